"""The drift of a training run on disk: `drift.jsonl`, one line a weight and observed step.

    {"step": 3, "layer": 0, "kind": "mlp.down_proj", "relative_error": 0.094, ...}
    {"step": 3, "layer": 0, "kind": "kl", "kl": 2.1e-4, "kl_together": 1.1e-3}

A resumed run removes the lines of steps that it repeats. Changes are against the last observation,
the first ones against the weights before the first step.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qat_core.drift.layer_kl import layer_kl
from qat_core.drift.monitor import DriftMonitor, summary
from qat_core.planning.recipe import Recipe

# sequences whose tokens the layers' KL is measured on
KL_SEQUENCES = 4
KL_EVERY = 20  # observations: it takes a forward pass a layer


class DriftLog:
    """Observes a model, whose rollouts hold `recipe`, every so many steps."""

    def __init__(self, model: nn.Module, recipe: Recipe, path: Path, every: int) -> None:
        self._model, self._recipe, self._path, self._every = model, recipe, path, every
        self._monitor = DriftMonitor(model, recipe)

    def start(self, step: int) -> None:
        """Looks at the weights before training goes on, so that its changes are known."""
        _drop_after(self._path, step)
        if step % self._every == 0:
            self._monitor.observe()

    def record(
        self, step: int, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> dict[str, float]:
        """Appends the step's rows; returns their means under `drift/`, empty if it is not due."""
        if step % self._every:
            return {}
        rows = self._monitor.observe()
        self._append([{"step": step} | asdict(row) for row in rows])
        is_kl_due = step % (KL_EVERY * self._every) == 0
        if is_kl_due and input_ids is not None and attention_mask is not None:
            some = slice(0, KL_SEQUENCES)
            found = layer_kl(self._model, self._recipe, input_ids[some], attention_mask[some])
            shared = {"step": step, "kind": "kl", "kl_together": found.together}
            self._append([shared | {"layer": n, "kl": kl} for n, kl in found.by_layer.items()])
        return summary(rows)

    def _append(self, rows: list[dict[str, Any]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def _drop_after(path: Path, last_step: int) -> None:
    """Removes lines of later steps, and the end of one that a kill cut short."""
    if not path.exists():
        return
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            if json.loads(line)["step"] <= last_step:
                kept.append(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: line {number}: not a row of drift; remove it") from error
    partial = path.with_suffix(".partial")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)
