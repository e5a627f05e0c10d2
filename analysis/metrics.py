"""What each metric means and how to name it on an axis; the catalogue itself is metrics.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter


class Metric(BaseModel):
    """One metric.

    Attributes:
        label: short name for an axis or a table.
        unit: empty for a pure number.
        formula: how it is computed from the symbols that the catalogue's head explains.
        weighting: what has equal weight: every token, every response, or the step as a whole.
        better: where a healthy run moves it.
        direction: of a divergence, which distribution is sampled from.
        aliases: name by system.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    unit: str = ""
    formula: str
    weighting: Literal["token", "sequence", "step"]
    better: Literal["lower", "higher", "closer to 0", "closer to 1", "neither"]
    direction: str | None = None
    aliases: Mapping[Literal["slime", "miles", "TRL", "prime-rl", "NeMo-RL"], str] = {}

    @property
    def axis_label(self) -> str:
        """Label, of a divergence with its direction; below it unit and weighting in brackets."""
        weighting = f"{self.weighting} mean" if self.weighting != "step" else ""
        brackets = ", ".join(filter(None, (self.unit, weighting)))
        head = f"{self.direction}, {self.label}" if self.direction else self.label
        return f"{head}\n({brackets})" if brackets else head


CATALOGUE: Mapping[str, Metric] = TypeAdapter(dict[str, Metric]).validate_python(
    yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
)
