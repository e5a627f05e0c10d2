"""vLLM set up to serve bits that `qat_core.exact` computes too."""
