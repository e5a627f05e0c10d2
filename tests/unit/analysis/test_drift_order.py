"""Which layers and kinds of weights drift first."""

import pandas as pd
import pytest

from analysis.drift.order import MOVED, first_steps, layer_kl, moved, order_table


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


def test_moved_adds_flips_and_is_a_mean_over_weights_and_seeds() -> None:
    table = moved([FAST, SLOW], "layer")
    assert table.columns.tolist() == [2, 4, 6]
    assert table.loc[0].tolist() == pytest.approx([0.01, 0.06, 0.12])
    assert table.loc[1].tolist() == pytest.approx([0.1, 0.25, 0.35])
    assert moved([FAST, SLOW], "kind").loc["q"].tolist() == pytest.approx([0.055, 0.155, 0.235])


def test_unknown_flips_add_nothing() -> None:
    table = moved([rows({(0, "q"): [0.1, None, 0.1]})], "layer")
    assert table.loc[0].dropna().tolist() == pytest.approx([0.1, 0.2])


def test_the_first_step_is_where_the_share_is_reached() -> None:
    assert first_steps(moved([FAST], "layer")) == {"0": 4, "1": 2}
    assert first_steps(moved([SLOW], "layer")) == {"0": None, "1": 4}
    assert MOVED == 0.1


def test_the_layers_kl_is_that_of_the_last_look() -> None:
    earlier = pd.DataFrame([{"step": 2, "layer": 0, "kind": "kl", "layer_kl": 1.0}])
    assert layer_kl([pd.concat([earlier, FAST]), SLOW]) == pytest.approx({"0": 2e-3})
    assert layer_kl([rows({(0, "q"): [0.1]})]) == {}


def test_the_table_has_a_row_a_layer_and_kind_and_an_arms_columns_beside_each_other() -> None:
    only_ffn = rows({(1, "up"): [0.3, 0.0, 0.0]})
    lines = order_table({"fast": [FAST], "slow": [SLOW], "ffn": [only_ffn]}).splitlines()
    assert lines[0] == "| Weights | fast | fast, KL | slow | slow, KL | ffn |"
    assert lines[2] == "| layer 0 | 4 (22%) | 1.0e-03 | never (2%) | 3.0e-03 | - |"
    assert lines[3] == "| layer 1 | 2 (60%) | - | 4 (10%) | - | 2 (30%) |"
    assert [line.split()[1] for line in lines[4:6]] == ["q", "up"]
