"""Weights that ranks draw for themselves: the same on any number of ranks, with and without QAT."""

from typing import Any

import pytest
import torch

from experiments.verl.seeded_weights import draw
from tests.integration import seeded_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.long


WORLD = 3  # which shards 8 experts unevenly


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Plain and prepared, in BF16 and FP32."""
    folder = tmp_path_factory.mktemp("seeded")
    run_ranks(seeded_ranks.run, (WORLD, str(folder)), WORLD)
    found: list[dict[str, Any]] = torch.load(folder / f"world{WORLD}.pt")
    return found


def test_shards_are_parts_of_what_one_device_draws(models: list[dict[str, Any]]) -> None:
    assert len(models) == 4
    std, device = seeded_ranks.CONFIG.initializer_range, torch.device("cpu")
    for model in models:
        for name, weight in model["weights"].items():
            expected = draw(name, weight.shape, seeded_ranks.SEED, std, device)
            assert torch.equal(weight, expected), name


def test_weights_are_those_of_a_new_model(models: list[dict[str, Any]]) -> None:
    weights = models[0]["weights"]
    norms = {name: value for name, value in weights.items() if value.ndim == 1}
    assert norms and all((value == 1).all() for value in norms.values())
    std = seeded_ranks.CONFIG.initializer_range
    matrices = [value.float() for name, value in weights.items() if name not in norms]
    assert all(abs(value.std() / std - 1) < 0.1 for value in matrices)
    assert len({value.flatten()[0].item() for value in matrices}) > len(matrices) / 2


def test_logits_are_finite_and_of_a_uniform_policy(models: list[dict[str, Any]]) -> None:
    for model in models:
        assert model["logits"].isfinite().all()
        assert model["logits"].std() < 2
