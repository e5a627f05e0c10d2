"""How the quantized weights of a model move while it trains, layer by layer and step by step."""
