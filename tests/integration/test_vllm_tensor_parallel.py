"""Tensor and expert parallel workers of vLLM serve, put together, the weights of a single one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs requirements/engines.txt")

from experiments.study.schema import ROOT
from tests.nano_models import write_nano

pytestmark = pytest.mark.slow

# Sums over two ranks are rounded in another order. Four greedy tokens on a CPU, dense and MoE, are
# 0.0016 and 0.0035 nats apart.
LOG_PROB_TOLERANCE = 0.02


class Part(NamedTuple):
    """A weight as one rank unpacked it; `widths` are the rows of its fused matrices."""

    layer: str
    widths: list[int]
    weight: Tensor


Serve = Callable[[int, bool], Path]


@pytest.fixture(scope="module", params=["nano-dense", "nano-moe"])
def serve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts vLLM with so many workers and loads the same weights; returns what they hold."""
    folder = tmp_path_factory.mktemp(request.param)
    write_nano(request.param, folder / "model", num_layers=2)

    def start(num_workers: int, expert_parallel: bool = False) -> Path:
        out = folder / f"{num_workers}-{expert_parallel}"
        if not out.exists():
            program = [sys.executable, "-m", "tests.integration.tensor_parallel"]
            arguments = [str(folder / "model"), str(num_workers), str(int(expert_parallel)), out]
            done = subprocess.run(
                [*program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stderr[-3000:]
        return out

    return start


def read(folder: Path, rank: int) -> list[Part]:
    return [Part(*part) for part in torch.load(folder / f"{rank}.pt")]


def put_together(parts: list[Part], expert_parallel: bool) -> list[Tensor]:
    """The whole matrices of a layer, of the parts that the ranks hold."""
    first, weights = parts[0], [part.weight for part in parts]
    if not first.widths:
        if expert_parallel:
            return [torch.cat(weights, 0)]
        if first.layer == "w2_":
            return [torch.cat(weights, 2)]
        return [torch.cat([w.unflatten(1, (2, -1)) for w in weights], 2).flatten(1, 2)]
    if first.layer.startswith("RowParallel"):
        return [torch.cat(weights, 1)]
    rows = zip(*(part.weight.split(part.widths) for part in parts), strict=True)
    return [torch.cat(matrix, 0) for matrix in rows]


def require_equal(whole: list[Part], ranks: list[list[Part]], expert_parallel: bool) -> None:
    assert len(whole) == len(ranks[0]) == len(ranks[1]) > 4
    for expected, *parts in zip(whole, *ranks, strict=True):
        found = put_together(parts, expert_parallel and not expected.widths)
        matrices = expected.weight.split(expected.widths or [len(expected.weight)])
        for matrix, served in zip(matrices, found, strict=True):
            # heads of k and v are repeated where there are fewer than ranks
            assert torch.equal(served[: len(matrix)], matrix), expected.layer
            assert torch.equal(served[len(matrix) :], matrix[: len(served) - len(matrix)])


def test_two_tensor_parallel_ranks_hold_the_weights_of_one(serve: Serve) -> None:
    one, two = serve(1, False), serve(2, False)
    require_equal(read(one, 0), [read(two, 0), read(two, 1)], expert_parallel=False)
    log_probs = [torch.load(folder / "log_prob.pt") for folder in (one, two)]
    assert log_probs[0] == pytest.approx(log_probs[1], abs=LOG_PROB_TOLERANCE)


def test_two_expert_parallel_ranks_hold_the_weights_of_one(serve: Serve) -> None:
    one = serve(1, False)
    if not any(not part.widths for part in read(one, 0)):
        pytest.skip("a dense model has no experts")
    two = serve(2, True)
    require_equal(read(one, 0), [read(two, 0), read(two, 1)], expert_parallel=True)
