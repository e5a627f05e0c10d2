"""NVFP4 on vLLM's CPU build, which has no kernels for it: unpacked to BF16 when it arrives."""
