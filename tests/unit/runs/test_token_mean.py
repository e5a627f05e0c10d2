import pytest

from experiments.rl.metric_names import K3_KL
from experiments.runs.metrics import Row, token_mean


def rows_of(*steps: tuple[float | None, float]) -> list[Row]:
    return [{"rollout_corr/k3_kl": kl, "response_length/mean": length} for kl, length in steps]


def test_mean_is_over_tokens() -> None:
    # (1 x 10 + 5 x 30) / 40
    assert token_mean(rows_of((1.0, 10.0), (5.0, 30.0)), K3_KL) == pytest.approx(4.0)


def test_a_run_that_overflowed_has_no_mean() -> None:
    assert token_mean(rows_of((1.0, 10.0), (None, 30.0)), K3_KL) is None


def test_no_step_has_no_mean() -> None:
    assert token_mean([], K3_KL) is None
