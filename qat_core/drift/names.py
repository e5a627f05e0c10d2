"""Names of the drift's file and measures, which other rooms read too. Imports nothing."""

FILE = "drift.jsonl"
MEASURES = (
    *("relative_error", "saturated_blocks", "zeroed_blocks", "threshold_distance"),
    *("flipped_codes", "scale_changes"),
)
