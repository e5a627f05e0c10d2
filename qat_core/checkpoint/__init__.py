"""Packed NVFP4 checkpoints in Hugging Face's folder form: write, convert, verify, read."""
