"""Products of NVFP4 weights on Hopper by the library Humming, and by this project's own kernel.

`linear.py` and `experts.py` as a choice beside Marlin go when verl's pin reaches vLLM 0.32. What
the exact mode multiplies by, `few_rows` above all, stays.
"""
