"""Another library's kernels for NVFP4 on Hopper; goes when verl's pin reaches vLLM 0.32."""
