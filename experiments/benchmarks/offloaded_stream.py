"""Weight stream of weights that lie on the host, as verl's actor leaves them with `param_offload`.

    python -m experiments.benchmarks.offloaded_stream RECORD.json [--device cuda] [--rounds 5]

Layers of a true shape are prepared, sharded by FSDP2 on one rank and moved to the host as verl
does it. Nothing that packs them on a GPU is faster than the copy of the weights there, which is
timed beside the stream. Its tensors are compared with those of the same weights packed on the GPU.
"""

import argparse
import tempfile
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

from experiments.benchmarks.device import require_device
from experiments.benchmarks.qat_layers import layer_stack
from experiments.benchmarks.sharded import BACKEND, shard
from experiments.benchmarks.timing import quartiles, time_in_turns
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from qat_core.arguments import positive_int
from qat_core.planning.plan import QuantPlan
from qat_core.planning.recipe import Recipe
from qat_core.training.preparation import prepare
from qat_core.units import BYTES_PER_GIB
from qat_core.weights.stream import weight_stream
from qat_core.weights.transfer import transfer_tensors

# 30B-A3B: an eighth of its layers
STACKS = {
    "cuda": [("qwen3-8b", 36), ("qwen3-30b-a3b", 6)],
    "cpu": [("tiny", 2), ("tiny-moe", 2)],
}
RECIPE = Recipe()


def measure(shape: str, layers: int, device: str, rounds: int) -> dict[str, Any]:
    """Seconds of copy and stream of one stack, and whether its tensors have the right bits."""
    model = layer_stack(shape, layers, device, torch.bfloat16)
    plan = prepare(model, RECIPE)
    shard(model)
    expected = [tensor.cpu() for _, tensor in _stream(model, plan, device)]
    model.to("cpu", non_blocking=True)
    streamed = [tensor.cpu() for _, tensor in _stream(model, plan, device)]
    times = time_in_turns(
        {"copy": partial(_copy, model, device), "stream": partial(_drain, model, plan, device)},
        device,
        rounds,
    )
    weights_gib = sum(weight.nbytes for weight in model.parameters()) / BYTES_PER_GIB
    return {
        "shape": shape,
        "layers": layers,
        "weights_gib": weights_gib,
        "tensors": len(expected),
        "equal_bits": all(_same_bytes(*pair) for pair in zip(streamed, expected, strict=True)),
        **{f"{arm}_s": [ms / 1e3 for ms in quartiles(found)] for arm, found in times.items()},
    }


def _stream(model: nn.Module, plan: QuantPlan, device: str) -> Any:
    return transfer_tensors(plan, weight_stream(model, plan, RECIPE, device))


def _drain(model: nn.Module, plan: QuantPlan, device: str) -> None:
    deque(_stream(model, plan, device), maxlen=0)


def _copy(model: nn.Module, device: str) -> None:
    for weight in model.parameters():
        weight.to(device, non_blocking=True)


def _same_bytes(first: Tensor, second: Tensor) -> bool:
    first, second = (tensor.flatten().view(torch.uint8) for tensor in (first, second))
    return torch.equal(first, second)


def main() -> None:
    """Measures every stack and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=positive_int, default=5)
    arguments = parser.parse_args()
    device = arguments.device
    require_device(device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            BACKEND[device], init_method=f"file://{folder}/rendezvous", rank=0, world_size=1
        )
        results = [measure(*stack, device, arguments.rounds) for stack in STACKS[device]]
        dist.destroy_process_group()
    Console().print_json(data=results)
    found = {"benchmark": "offloaded_stream", **origin(device), "rounds": arguments.rounds}
    write_json(arguments.record, found | {"stacks": results})


if __name__ == "__main__":
    run_cli(main)
