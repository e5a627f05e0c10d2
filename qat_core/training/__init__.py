"""The fake-quantized parameter: it trains in full precision and reads as NVFP4 in products.

`preparation.prepare` puts it onto a model.
"""
