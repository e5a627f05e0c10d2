"""A recipe explained in words: what it quantizes in a model, what not, and why."""

import re
from collections import Counter

from torch import nn

from qat_core.plan import Entry, QuantPlan, refusals, unchecked_plan
from qat_core.recipe import Recipe


def explain(model: nn.Module, recipe: Recipe) -> str:
    """Table of what is quantized, what is not and why. Changes and refuses nothing.

    Layers that differ in their number only share a line. Below the table stands an error for each
    thing that `prepare` would refuse.
    """
    unchecked = unchecked_plan(model, recipe)
    lines = _table(unchecked)
    lines += [f"error: {each}" for each in refusals(model, recipe, unchecked)]
    return "\n".join(lines)


def _table(unchecked: QuantPlan) -> list[str]:
    rows = Counter(_row(entry) for entry in unchecked.entries)
    cells = [(f"{count}x", *row) for row, count in rows.items()]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _row(entry: Entry) -> tuple[str, str, str, str]:
    name = re.sub(r"\b\d+\b", "*", entry.name)
    shape = "x".join(map(str, entry.shape))
    fused = (entry.group or "").rpartition(".")[2]
    group = f", one scale for {fused}" if "+" in fused else ""
    return name, shape, "NVFP4" if entry.quantized else "BF16", entry.reason + group
