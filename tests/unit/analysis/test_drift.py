"""Drift of weights: its heat map, and which layers and kinds of weights drift first."""

from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.drift.maps import draw, layer_by_step
from analysis.drift.order import order_table
from analysis.style import save_figure
from experiments.runs.drift import KL, read_drift
from experiments.support.json_files import write_jsonl
from tests.unit.analysis.synthetic_results import drift_of
from tests.unit.analysis.test_figures import texts_of


def test_a_cell_is_the_mean_over_a_layers_weights() -> None:
    weights = pd.DataFrame(product(range(1, 5), range(3), (0, 0.5)), columns=["step", "layer", "x"])
    weights["error"] = weights["step"] + 10 * weights["layer"] + weights["x"]
    expected = np.add.outer(10 * np.arange(3), np.arange(1, 5)) + 0.25
    np.testing.assert_allclose(layer_by_step(weights, "error").to_numpy(), expected)


def drift(folder: Path) -> pd.DataFrame:
    write_jsonl(folder / "drift.jsonl", drift_of(30))
    return read_drift(folder)


def test_the_map_shows_every_run_and_measure_and_repeats(tmp_path: Path) -> None:
    runs = dict.fromkeys(("one", "two"), drift(tmp_path))
    figure = draw(runs, ("relative_error", KL))
    shown = texts_of(figure)
    assert "one" in shown and "two" in shown and "quantization error" in shown
    maps = [panel.collections[0].get_array() for panel in figure.axes[:4]]
    np.testing.assert_allclose(np.ravel(maps[2]), [1, 0.01])
    for name in ("a.png", "b.png"):
        save_figure(partial(draw, runs, ("relative_error", KL)), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_measure_that_was_never_due_leaves_an_empty_panel(tmp_path: Path) -> None:
    rows = drift(tmp_path)
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
