"""What a run leaves on disk: attempts, manifest, provenance, checkpoints, records."""
