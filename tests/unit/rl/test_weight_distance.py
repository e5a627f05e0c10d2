"""Distance from the base weights in steps of the NVFP4 grid."""

import pytest
import torch
from torch import nn

from experiments.rl.weight_distance import WeightDistance
from qat_core.planning.plan import plan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare


def test_distance_of_one_grid_step_is_one() -> None:
    model = nn.Sequential(nn.Linear(32, 8, bias=False))
    with torch.no_grad():  # largest value 6 at scale 1: the grid's values are its codes
        model[0].weight.copy_(torch.tensor([6.0, 0.0, 1.0, -3.0] * 8).expand(8, 32))
    distance = WeightDistance(model, plan(model, Recipe()), Recipe())
    assert distance.rms(model).item() == 0.0
    with torch.no_grad():
        model[0].weight.add_(0.5)  # the finest step
    assert distance.rms(model).item() == pytest.approx(1.0)
    with torch.no_grad():  # two of eight rows move by three more
        model[0].weight[:2].add_(1.5)
    assert distance.rms(model).item() == pytest.approx(((6 * 1 + 2 * 16) / 8) ** 0.5)


def test_blocks_of_zeros_count_as_not_moved() -> None:
    model = nn.Sequential(nn.Linear(32, 1, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()[:, :16] = 6.0
    distance = WeightDistance(model, plan(model, Recipe()), Recipe())
    with torch.no_grad():
        model[0].weight.add_(0.5)
    assert distance.rms(model).item() == pytest.approx(0.5**0.5)


def test_of_a_prepared_model_all_weights_count() -> None:
    model = nn.Sequential(nn.Linear(32, 8, bias=False), nn.Linear(32, 8, bias=False))
    everything = plan(model, Recipe())
    prepare(model, Recipe(ignore=("1",)))
    distance = WeightDistance(model, everything, Recipe())
    assert distance.num_weights == 2 * 32 * 8
    with torch.no_grad():
        model[1].weight.add_(0.5)
    assert distance.rms(model).item() > 0
