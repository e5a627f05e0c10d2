"""Base checkpoints: what every run of a model starts from."""
