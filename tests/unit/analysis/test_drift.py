"""Drift of weights: its heat map, and which layers and kinds of weights drift first."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.drift.maps import draw, layer_by_step
from analysis.drift.order import order_table
from analysis.style import save_figure
from experiments.runs.drift import KL, read_drift
from qat_core.drift import MEASURES
from tests.unit.analysis.test_figures import texts_of

ROW = dict.fromkeys(MEASURES, 0.1)


def write_drift(folder: Path, change: Callable[[int, int, dict], None] | None = None) -> Path:
    """Two weights of three layers over four steps, and a KL of each layer at step 4."""
    folder.mkdir()
    rows = []
    for step in range(1, 5):
        for layer in range(3):
            for kind in ("mlp.up_proj", "mlp.down_proj"):
                row = {"step": step, "layer": layer, "kind": kind, **ROW}
                if change:
                    change(step, layer, row)
                rows.append(row)
    rows += [{"step": 4, "layer": n, "kind": "kl", "kl": 10.0**-n} for n in range(3)]
    (folder / "drift.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_a_cell_is_the_mean_over_a_layers_weights(tmp_path: Path) -> None:
    def change(step: int, layer: int, row: dict) -> None:
        row["relative_error"] = step + 10 * layer + (0.5 if "up" in row["kind"] else 0)

    table = layer_by_step(read_drift(write_drift(tmp_path / "run", change)), "relative_error")
    expected = np.add.outer(10 * np.arange(3), np.arange(1, 5)) + 0.25
    np.testing.assert_allclose(table.to_numpy(), expected)


def test_the_map_shows_every_run_and_measure_and_repeats(tmp_path: Path) -> None:
    runs = {name: read_drift(write_drift(tmp_path / name)) for name in ("one", "two")}
    figure = draw(runs, ("relative_error", KL))
    shown = texts_of(figure)
    assert "one" in shown and "two" in shown and "quantization error" in shown
    maps = [panel.collections[0].get_array() for panel in figure.axes[:4]]
    np.testing.assert_allclose(np.ravel(maps[2]), [1, 0.1, 0.01])
    for name in ("a.png", "b.png"):
        save_figure(partial(draw, runs, ("relative_error", KL)), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_measure_that_was_never_due_leaves_an_empty_panel(tmp_path: Path) -> None:
    rows = read_drift(write_drift(tmp_path / "run"))
    figure = draw({"run": rows[rows["kind"] != "kl"].drop(columns=KL)}, (KL,))
    assert not figure.axes[0].collections


def test_rows_without_a_layer_are_left_out() -> None:
    rows = pd.DataFrame([{"step": 1, "layer": None, "kind": "x", "flipped_codes": 1.0}])
    assert layer_by_step(rows, "flipped_codes").empty


def rows(flips: dict[tuple[int, str], list[float | None]], kl: float | None = None) -> pd.DataFrame:
    """A weight's flips at steps 2, 4, ..."""
    weights = [
        {"step": 2 * (number + 1), "layer": layer, "kind": kind, "flipped_codes": share}
        for (layer, kind), shares in flips.items()
        for number, share in enumerate(shares)
    ]
    looks = [{"step": 4, "layer": 0, "kind": "kl", "layer_kl": kl}] if kl else []
    return pd.DataFrame(weights + looks)


FAST = rows({(0, "q"): [0.02, 0.1, 0.1], (1, "q"): [0.2, 0.2, 0.2]}, kl=1e-3)
SLOW = rows({(0, "q"): [0.0, 0.0, 0.02], (1, "q"): [0.0, 0.1, 0.0]}, kl=3e-3)


def test_the_table_adds_flips_and_has_means_over_seeds_and_the_kl_of_the_last_look() -> None:
    earlier = pd.DataFrame([{"step": 2, "layer": 0, "kind": "kl", "layer_kl": 1.0}])
    both = [pd.concat([earlier, FAST]), SLOW]
    only_ffn = rows({(1, "up"): [0.3, None, 0.1]})  # unknown flips add nothing
    lines = order_table({"slow": [SLOW], "both": both, "ffn": [only_ffn]}).splitlines()
    assert lines[0] == "| Weights | slow | slow, KL | both | both, KL | ffn |"
    assert lines[2] == "| layer 0 | never (2%) | 3.0e-03 | 6 (12%) | 2.0e-03 | - |"
    assert lines[3] == "| layer 1 | 4 (10%) | - | 2 (35%) | - | 2 (40%) |"
    assert lines[4].startswith("| q | never (6%) | - | 4 (2")
    assert lines[5].startswith("| up | - |")
