"""What each metric means and how to name it on an axis; the catalogue itself is metrics.yaml.

docs/metrics.md shows it, filled by `analysis.documents`.
"""

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, TypeAdapter

from analysis.markdown import Row, markdown_table


class Metric(BaseModel, frozen=True, extra="forbid"):
    """One metric."""

    label: str  # short name for an axis or a table
    unit: str = ""  # empty for a pure number
    formula: str  # how it is computed from the symbols that the catalogue's head explains
    # what the mean is over: tokens or responses (sequence); step: one value a step
    weighting: Literal["token", "sequence", "step"]
    # where a healthy run moves it
    better: Literal["lower", "higher", "closer to 0", "closer to 1", "neither"]
    direction: str | None = None  # of a divergence, which distribution is sampled from
    # name by system
    aliases: Mapping[Literal["slime", "miles", "TRL", "prime-rl", "NeMo-RL"], str] = {}

    @property
    def axis_label(self) -> str:
        """Label, of a divergence with its direction; below it unit and weighting in brackets."""
        weighting = f"{self.weighting} mean" if self.weighting != "step" else ""
        brackets = ", ".join(filter(None, (self.unit, weighting)))
        head = f"{self.direction}, {self.label}" if self.direction else self.label
        return f"{head}\n({brackets})" if brackets else head


CATALOGUE: Mapping[str, Metric] = TypeAdapter(dict[str, Metric]).validate_python(
    yaml.load(Path(__file__).with_suffix(".yaml").read_text(), yaml.CSafeLoader)
)


def catalogue_text() -> str:
    """The catalogue as Markdown, a table for each first part of the metrics' names."""
    by_prefix = groupby(sorted(CATALOGUE.items()), key=lambda row: row[0].partition("/")[0])
    tables = [(prefix, markdown_table(_row(*it) for it in rows)) for prefix, rows in by_prefix]
    return "\n\n".join(f"## {prefix}\n\n{table}" for prefix, table in tables) + "\n"


def _row(name: str, metric: Metric) -> Row:
    cells = {
        "Metric": f"`{name}`",
        "What": ", ".join(filter(None, (metric.direction, metric.label))),
        "Formula": metric.formula,
        "Unit": metric.unit,
        "Mean over": metric.weighting,
        "Better": metric.better,
        "Elsewhere": "; ".join(f"{s}: `{n}`" for s, n in metric.aliases.items()),
    }
    # a bar ends a cell of a table
    return {heading: cell.replace("|", "\\|") for heading, cell in cells.items()}
