"""Tensor and expert parallel workers of vLLM load, put together, the packed bytes of a single one.

On a machine with two GPUs the workers take a GPU each, and there are a dense model and an MoE, with
Marlin's and with Humming's kernels. On a CPU one model has both, as each start takes many seconds:
its first layer is dense.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from qat_core.rollout.vllm.switches import EXPERTS_VARIABLE, LINEAR_VARIABLE
from tests.nano_models import write_nano

pytestmark = pytest.mark.long

# Sums over two ranks are rounded in another order. Four greedy tokens, dense and MoE: on a CPU
# 0.0019 and 0.0012 nats apart, on two H200 with Marlin's kernels below 0.02 and 0.025, with
# Humming's 0.0077 and 0.0093 (0.0084 with experts shared out); there the bound is twice the largest
# of the runs seen. That no weight is wrong is what the comparison of bytes shows.
LOG_PROB_TOLERANCE = {"cpu": 0.02, "cuda": 0.05}


ON_GPUS = torch.cuda.is_available()
# Halves of every matrix are at least 128 wide, as Marlin needs them on a GPU.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "mlp_only_layers": [] if ON_GPUS else [0],
}


class Layer(NamedTuple):
    """A layer as one rank loaded it; `widths` are the rows of its fused matrices."""

    kind: str
    widths: list[int]
    tensors: dict[str, Tensor]


Serve = Callable[[str, int, bool], Path]


MODELS = ["nano-dense", "nano-moe"] if ON_GPUS else ["nano-moe"]
HUMMING = [f"{model}-humming" for model in MODELS] if ON_GPUS else []
SERVED = MODELS + HUMMING
EXPERTS = [it for it in SERVED if "moe" in it]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts vLLM with so many workers once and loads the weights; returns what they hold."""

    @cache
    def start(served: str, num_workers: int, expert_parallel: bool) -> Path:
        model = served.removesuffix("-humming")
        variables = (LINEAR_VARIABLE, EXPERTS_VARIABLE) if served != model else ()
        folder = tmp_path_factory.mktemp(f"{served}-{num_workers}-{expert_parallel}-")
        write_nano(model, folder / "model", num_layers=2, **SIZES)
        program = [sys.executable, "-m", "tests.integration.tensor_parallel", folder / "model"]
        out = folder / "out"
        done = subprocess.run(
            [*program, str(num_workers), str(int(expert_parallel)), out],
            cwd=ROOT,
            env=os.environ | dict.fromkeys(variables, "humming"),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return out

    return start


def read(folder: Path, rank: int) -> list[Layer]:
    return [Layer(*layer) for layer in torch.load(folder / f"{rank}.pt")]


def put_together(name: str, layers: list[Layer], expert_parallel: bool) -> list[Tensor]:
    """The whole matrices, a tensor each, of the parts that the ranks hold."""
    first, parts = layers[0], [layer.tensors[name] for layer in layers]
    if name.startswith(("w13_", "w2_")):  # experts
        if expert_parallel:
            return [torch.cat(parts, 0)]
        if name.endswith("global_scale"):
            assert torch.equal(*parts)
            return [parts[0]]
        if name.startswith("w2_"):
            return [torch.cat(parts, 2)]
        return [torch.cat([part.unflatten(1, (2, -1)) for part in parts], 2).flatten(1, 2)]
    if name.endswith("global_scale"):
        assert torch.equal(*parts)
        return [parts[0]]
    if first.kind.startswith("RowParallel"):
        return [torch.cat(parts, 1)]
    rows = zip(*(layer.tensors[name].split(layer.widths) for layer in layers), strict=True)
    return [torch.cat(matrix, 0) for matrix in rows]


def matrices(name: str, layer: Layer) -> tuple[Tensor, ...]:
    """As `put_together`, of the one rank that holds all."""
    tensor = layer.tensors[name]
    is_fused = len(layer.widths) > 1 and not name.endswith("global_scale")
    return tensor.split(layer.widths) if is_fused else (tensor,)


def require_equal(whole: list[Layer], ranks: list[list[Layer]], expert_parallel: bool) -> None:
    assert len(whole) == len(ranks[0]) == len(ranks[1]) > 4
    for expected, *parts in zip(whole, *ranks, strict=True):
        for name in expected.tensors:
            found = put_together(name, parts, expert_parallel)
            for matrix, served in zip(matrices(name, expected), found, strict=True):
                matrix, served = matrix.view(torch.uint8), served.view(torch.uint8)
                # heads of k and v are repeated where there are fewer than ranks
                assert torch.equal(served[: len(matrix)], matrix), (expected.kind, name)
                assert torch.equal(served[len(matrix) :], matrix[: len(served) - len(matrix)])


def require_close_log_probs(one: Path, two: Path) -> None:
    tolerance = LOG_PROB_TOLERANCE["cuda" if ON_GPUS else "cpu"]
    log_probs = [torch.load(folder / "log_prob.pt") for folder in (one, two)]
    assert log_probs[0] == pytest.approx(log_probs[1], abs=tolerance)


@pytest.mark.verl_table(
    "tensor parallel rollouts, dense and MoE",
    "two CPU workers hold the weights of one, to the bit",
    cases=["nano-moe"],
)
@pytest.mark.parametrize("served", SERVED)
def test_two_tensor_parallel_ranks_hold_the_weights_of_one(serve: Serve, served: str) -> None:
    one, two = serve(served, 1, False), serve(served, 2, False)
    kinds = {layer.kind for layer in read(one, 0)}
    assert ON_GPUS or kinds >= {"QKVParallelLinear", "MergedColumnParallelLinear", "RoutedExperts"}
    require_equal(read(one, 0), [read(two, 0), read(two, 1)], expert_parallel=False)
    require_close_log_probs(one, two)


@pytest.mark.verl_table(
    "expert parallel rollouts", "two CPU workers hold the weights of one, to the bit"
)
@pytest.mark.parametrize("served", EXPERTS)
def test_two_expert_parallel_ranks_hold_the_weights_of_one(serve: Serve, served: str) -> None:
    one, two = serve(served, 1, False), serve(served, 2, True)
    assert any(layer.kind == "RoutedExperts" for layer in read(one, 0))
    require_equal(read(one, 0), [read(two, 0), read(two, 1)], expert_parallel=True)
    if ON_GPUS:
        require_close_log_probs(one, two)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(
    ("served", "expert_parallel"),
    [*((it, False) for it in SERVED), *((it, True) for it in EXPERTS)],
)
def test_two_ranks_hold_the_same_bytes_in_place_as_after_a_reload(
    serve: Serve, served: str, expert_parallel: bool
) -> None:
    out = serve(served, 2, expert_parallel)
    for rank in range(2):
        found = json.loads((out / f"{rank}.json").read_text())
        assert found["differ"] == [] and found["replaced"] > 4 and found["in_place"] > 4
