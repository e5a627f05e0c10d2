"""Parts of a training step of layers that lie on the host in between, as verl's actor does.

    python -m experiments.benchmarks.offloaded_steps RECORD.json [--worlds 2] [--device cuda]
        [--rounds 5]

Layers of a true shape in BF16 under FSDP2, with gradient checkpointing. As with `param_offload`,
log-probs and training each fetch the weights and offload them after; between that are micro-batches
of 8 sequences of 512 tokens a rank. Fetching and offloading are timed alone, too. The device is
idle before and after each part; issued is when the CPU has queued all of it. Arms `bf16` and `qat`
take turns. There is no optimizer, which is the same for both.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.benchmarks.qat_layers import apply_arm, layer_stack, step_inputs
from experiments.benchmarks.sharded import measure_on_ranks, shard
from experiments.benchmarks.timing import StepTime, quartiles, time_steps
from experiments.support.cli import run_cli
from qat_core.arguments import positive_int
from qat_core.training.preparation import scales_of

ARMS = ("bf16", "qat")
SEQUENCES, MICRO_BATCHES = 8, 4
TOKENS = {"cuda": 512, "cpu": 4}  # of a sequence
# 30B-A3B: half of its layers, as `qwen3_moe_half_smoke` has
STACKS = {
    "cuda": [("qwen3-8b", 36), ("qwen3-30b-a3b", 24)],
    "cpu": [("tiny-moe", 2)],
}


def measure(shape: str, layers: int, device: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of each part by arm, until it is queued and until it has ended."""
    of_arms = {}
    for arm in ARMS:
        model = layer_stack(shape, layers, device, torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        apply_arm(model, arm)
        shard(model)
        inputs = step_inputs(model, SEQUENCES, TOKENS[device], device)
        offload(model)
        of_arms[arm] = parts(model, device, *inputs)
    steps = {f"{arm} {name}": of_arms[arm][name] for arm in ARMS for name in of_arms[arm]}
    times = time_steps(steps, device, rounds)
    found = {arm: {name: spread(times[f"{arm} {name}"]) for name in of_arms[arm]} for arm in ARMS}
    world = dist.get_world_size()
    return {"shape": shape, "layers": layers, "ranks": world, "arms": found}


def spread(times: list[StepTime]) -> dict[str, list[float]]:
    """Quartiles."""
    return {
        "ms": quartiles([time.step_ms for time in times]),
        "issue_ms": quartiles([time.issue_ms for time in times]),
    }


def parts(model: nn.Module, device: str, x: Tensor, grad: Tensor) -> dict[str, Callable[[], None]]:
    """Of a step, in their order; the weights are on the host before the first."""
    return {
        "log-probs": partial(log_probs, model, device, x),
        "training": partial(train, model, device, x, grad),
        "fetch": partial(fetch, model, device),
        "offload": partial(offload, model),
    }


def fetch(model: nn.Module, device: str) -> None:
    """As verl's `load_fsdp2_model_to_gpu`."""
    model.to(device, non_blocking=True)


def offload(model: nn.Module) -> None:
    """As this project's engine and then verl's `offload_fsdp2_model_to_cpu`."""
    scales = scales_of(model)
    if scales is not None:
        scales.packed_shards.clear()
    model.to("cpu", non_blocking=True)
    torch.cuda.empty_cache()


@torch.no_grad()
def log_probs(model: nn.Module, device: str, x: Tensor) -> None:
    """Forward passes of weights on the host."""
    fetch(model, device)
    for _ in range(MICRO_BATCHES):
        model(inputs_embeds=x, use_cache=False)
    model.reshard()  # type: ignore[operator]
    offload(model)


def train(model: nn.Module, device: str, x: Tensor, grad: Tensor) -> None:
    """Forward and backward passes of weights on the host; leaves no gradients behind."""
    fetch(model, device)
    for _ in range(MICRO_BATCHES):
        model(inputs_embeds=x, use_cache=False).last_hidden_state.backward(grad)
        x.grad = None
    model.zero_grad(set_to_none=True)
    offload(model)


def main() -> None:
    """Measures every stack and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--worlds", type=positive_int, nargs="+", default=[2])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=positive_int, default=5)
    args = parser.parse_args()
    settings = {
        "benchmark": "offloaded_steps",
        "sequences": SEQUENCES,
        "tokens_per_sequence": TOKENS[args.device],
        "micro_batches": MICRO_BATCHES,
        "rounds": args.rounds,
    }
    measured = partial(measure, device=args.device, rounds=args.rounds)
    stacks = STACKS[args.device]
    measure_on_ranks(measured, stacks, args.worlds, args.device, args.record, settings)


if __name__ == "__main__":
    run_cli(main)
