"""vLLM's own kernel for NVFP4 on Hopper: its layout, and cuBLAS in its place for many rows."""
