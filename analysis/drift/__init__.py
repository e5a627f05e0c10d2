"""Drift of quantized weights: maps of layers by steps, and which weights drift first."""
