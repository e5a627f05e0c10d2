"""Packed weights written to where vLLM's kernels read them, past its reload."""
