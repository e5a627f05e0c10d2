"""verl's engine, worker and configuration for NVFP4 QAT; only verl loads these modules."""
