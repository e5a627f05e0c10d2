"""How the quantized weights of a model move while it trains, layer by layer and step by step."""

MEASURES = (
    *("relative_error", "saturated_blocks", "zeroed_blocks", "threshold_distance"),
    *("flipped_codes", "scale_changes"),
)
