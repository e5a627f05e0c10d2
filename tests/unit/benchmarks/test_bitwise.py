"""The benchmark of repeated syncs: which engines count as equal."""

from types import SimpleNamespace

import torch
from torch import nn

from experiments.benchmarks.bitwise import (
    State,
    compare,
    differing,
    digests,
    summary,
)
from qat_core.rollout.engine import Rollouts


def rollouts(log_prob: float) -> Rollouts:
    ones = torch.ones(1, 2, dtype=torch.long)
    log_probs = torch.full((1, 1), log_prob)
    done = torch.tensor([True])
    return Rollouts(ones, ones, ones[:, 1:].float(), log_probs, done)


def served(model: nn.Module) -> SimpleNamespace:
    """A worker of vLLM's that serves it."""
    return SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))


def test_samples_and_tensors_are_compared_apart() -> None:
    states = {
        "synced": State(rollouts(-1.0), {"w": "a"}),
        "synced, again": State(rollouts(-1.5), {"w": "a"}),  # as kernels do that repeat no bits
        "other weights": State(rollouts(-2.0), {"w": "b"}),
    }
    found = compare(states)
    assert found["equal"] == {"synced": True, "synced, again": False, "other weights": False}
    assert found["equal_weights"] == {
        "synced": True,
        "synced, again": True,
        "other weights": False,
    }
    assert found["differing_tensors"] == {"other weights": "w"}
    row = summary("dense", {"ways": {"reload": {"in_place": False}}, **found})
    assert (row["came_by"], row["samples"]) == ("reload", "no: its own differ")
    assert (row["weights"], row["unequal"]) == ("synced; synced, again", "other weights")


def test_one_bit_of_a_served_tensor_is_seen_and_what_nothing_reads_is_not() -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    layer.register_buffer("weight_scale", torch.ones(4).to(torch.float8_e4m3fn))
    layer.register_buffer("_k_scale", torch.tensor(1.0))
    layer.register_buffer("w13_input_scale", torch.tensor(1.0))
    before = digests(served(layer))
    assert sorted(before) == ["bias", "weight", "weight_scale"]
    layer.get_buffer("_k_scale").fill_(2.0)
    assert not differing(digests(served(layer)), before)
    layer.weight.data.view(torch.int16)[0, 0] ^= 1
    assert differing(digests(served(layer)), before) == ["weight"]
