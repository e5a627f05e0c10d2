"""FP32 masters of BF16 parameters."""

import math

import pytest
import torch
from torch import nn

from experiments.rl.optimizer import MasterAdamW


def test_updates_too_small_for_bf16_add_up() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.accumulate()
        optimizer.step(max_grad_norm=10.0)
    # Adam moves by lr a step under a constant gradient: 0.99, of which BF16 keeps 8 bits
    assert optimizer.masters[0][0].item() == pytest.approx(0.99, abs=1e-5)
    assert weight.tolist() == [0.98828125] * 4


def test_micro_batch_gradients_add_up_in_fp32_and_are_clipped() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([weight], lr=1.0, weight_decay=0.0)
    for _ in range(300):  # in BF16 the sum would stop at 256
        weight.grad = torch.ones_like(weight)
        optimizer.accumulate()
    assert optimizer.step(max_grad_norm=1.0) == 300.0
    first_moment = optimizer.adamw.state[optimizer.masters[0]]["exp_avg"]
    assert first_moment.item() == pytest.approx(0.1), "a tenth of the clipped gradient"


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_dropped(bad: float) -> None:
    def run(*gradients: list[float]) -> tuple[MasterAdamW, list[float]]:
        optimizer = MasterAdamW([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], 0.1, 0.1)
        norms = []
        for gradient in gradients:
            optimizer.parameters[0].grad = torch.tensor(gradient).bfloat16()
            optimizer.accumulate()
            norms.append(optimizer.step(1.0))
        return optimizer, norms

    without, _ = run([1.0, 2.0], [2.0, -1.0])
    skipping, norms = run([1.0, 2.0], [bad, 0.0], [2.0, -1.0])
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]
    assert torch.equal(skipping.masters[0], without.masters[0])
    assert torch.equal(skipping.parameters[0], without.parameters[0])


def test_state_survives_a_round_trip() -> None:
    def run(num_steps: int, state: dict | None = None) -> MasterAdamW:
        optimizer = MasterAdamW([nn.Parameter(torch.ones(3, dtype=torch.bfloat16))], 0.1, 0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(num_steps):
            parameter = optimizer.parameters[0]
            parameter.grad = parameter.detach() * torch.tensor([1.0, 2.0, -1.0]).bfloat16()
            optimizer.accumulate()
            optimizer.step(1.0)
        return optimizer

    whole, resumed = run(6), run(3, run(3).state_dict())
    assert torch.equal(whole.masters[0], resumed.masters[0])
    assert torch.equal(whole.parameters[0], resumed.parameters[0])
