"""NVFP4 quantization-aware training for LLM reinforcement learning."""
