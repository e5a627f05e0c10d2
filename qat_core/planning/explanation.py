"""A recipe explained in words: what it quantizes in a model, what not, and why."""

import re
from collections import Counter
from collections.abc import Iterable
from math import prod

import torch
from torch import nn

from qat_core.planning.plan import Entry, QuantPlan, refusals, unchecked_plan
from qat_core.planning.recipe import Recipe
from qat_core.units import BYTES_PER_MIB

PACKED_BYTES = 0.5625  # of a weight: a code, and a sixteenth of a block scale
DTYPES = {"bfloat16": "BF16", "float32": "FP32"}


def explain(model: nn.Module, recipe: Recipe) -> str:
    """Table of what is quantized, what is not and why. Changes and refuses nothing.

    Layers that differ in their number only share a line. The table ends with totals: the share of
    weights in NVFP4, and the size of all before and after. Below it stands an error for each thing
    that `prepare` would refuse.

    Args:
        model: prepared or not; on the meta device too.
        recipe: what to quantize.
    """
    unchecked = unchecked_plan(model, recipe)
    before = sum(prod(e.shape) * getattr(torch, e.dtype).itemsize for e in unchecked.entries)
    saved = sum((2 - PACKED_BYTES) * prod(e.shape) for e in unchecked.entries if e.quantized)
    lines = [*table(unchecked.entries), totals(unchecked, before, before - saved)]
    lines += [f"error: {each}" for each in refusals(model, recipe, unchecked)]
    return "\n".join(lines)


def totals(plan: QuantPlan, bytes_before: float, bytes_after: float) -> str:
    """The share of weights that a plan packs, and the size of all before and after."""
    total = sum(prod(entry.shape) for entry in plan.entries)
    packed = sum(prod(entry.shape) for entry in plan.entries if entry.quantized)
    before, after = bytes_before / BYTES_PER_MIB, bytes_after / BYTES_PER_MIB
    return (
        f"total: {packed / max(total, 1):.1%} of {total:,} weights in NVFP4; "
        f"{before:,.2f} MiB before, {after:,.2f} MiB after"
    )


def table(entries: Iterable[Entry]) -> list[str]:
    """A line for all entries that differ in numbers of layers and experts only."""
    rows = Counter(map(_row, entries))
    cells = [(f"{count}x", *row) for row, count in rows.items()]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(5)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _row(entry: Entry) -> tuple[str, str, str, str]:
    name = re.sub(r"\b\d+\b", "*", entry.name)
    shape = "x".join(map(str, entry.shape))
    fused = (entry.group or "").rpartition(".")[2]
    group = f", one scale for {fused}" if "+" in fused else ""
    form = "NVFP4" if entry.quantized else DTYPES.get(entry.dtype, entry.dtype)
    return name, shape, form, entry.reason + group
