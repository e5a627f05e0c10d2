"""One self-contained page a study: claims, figures, memory, provenance, records and protocol."""
