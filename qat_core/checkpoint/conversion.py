"""What a conversion did, in words."""

from dataclasses import dataclass

from qat_core.planning.explanation import table, totals
from qat_core.planning.plan import QuantPlan

RANDOM_EXPERTS = (
    "note: transformers 5.10 gives packed experts random values (MISSING in its load report), "
    "whoever packed them; serve this checkpoint with vLLM"
)


@dataclass(frozen=True)
class Conversion:
    """Of a checkpoint folder into a packed one.

    `left_out` are keys of the source that transformers leaves out by its own lists; bytes are of
    all tensors, before and after.
    """

    plan: QuantPlan
    left_out: tuple[str, ...]
    source_bytes: int
    packed_bytes: int
    packed_experts: bool

    def __str__(self) -> str:
        """Matrices that are not packed and why, keys that were left out, and totals."""
        kept = [e for e in self.plan.entries if not e.quantized and len(e.shape) > 1]
        lines = ["not packed:", *(f"  {row}" for row in table(kept))] if kept else []
        if self.left_out:
            more = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
            lines.append(
                f"left out: {', '.join(self.left_out[:3])}{more}: transformers leaves them out by "
                "its own lists, as draft layers and old buffers, so they are not trained either; "
                "take them from the source to decode speculatively"
            )
        lines += [RANDOM_EXPERTS] if self.packed_experts else []
        return "\n".join([*lines, totals(self.plan, self.source_bytes, self.packed_bytes)])
