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

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.benchmarks.qat_layers import apply_arm, layer_stack, step_inputs
from experiments.benchmarks.records import Column, Row, shape_of
from experiments.benchmarks.sharded import measure_on_ranks, shard
from experiments.benchmarks.timing import quartiles, time_steps
from experiments.support.cli import run_cli
from qat_core.arguments import positive_int
from qat_core.training.preparation import state_of

ARMS = ("bf16", "qat")
SEQUENCES, MICRO_BATCHES = 8, 4
TOKENS = {"cuda": 512, "cpu": 4}  # of a sequence
# 30B-A3B: half of its layers, as `qwen3_moe_half_smoke` has
STACKS = {
    "cuda": [("qwen3-8b", 36), ("qwen3-30b-a3b", 24)],
    "cpu": [("tiny-moe", 2)],
}


COLUMNS = {"shape": Column(heading="Shape"), "layers": Column(heading="Layers")}
COLUMNS |= {"ranks": Column(heading="Ranks"), "part": Column(heading="Part")}
COLUMNS |= {
    f"{arm}{key}_ms": Column(heading=f"{arm}{words}, ms", format=",.0f")
    for arm in ARMS
    for key, words in (("", ""), ("_issue", " issued"))
}
COLUMNS["of_bf16"] = Column(heading="qat of bf16", format=".3f")
NOTE = (
    "Median of so many rounds, both arms in turns; in brackets their quartiles. Issued: when the "
    "CPU had queued all of it. Ratios are of medians. Log-probs and training fetch the weights "
    "first and offload them after."
)


def measure(shape: str, layers: int, device: str, rounds: int) -> list[Row]:
    """Milliseconds of each part by arm, until it is queued and until it has ended: quartiles."""
    of_arms = {}
    for arm in ARMS:
        model = layer_stack(shape, layers, device, torch.bfloat16)
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        apply_arm(model, arm)
        shard(model)
        inputs = step_inputs(model, SEQUENCES, TOKENS[device], device)
        offload(model)
        of_arms[arm] = parts(model, device, *inputs)
    names = list(of_arms["bf16"])
    steps = {f"{arm} {name}": of_arms[arm][name] for arm in ARMS for name in names}
    times = time_steps(steps, device, rounds)
    of_stack: Row = {"shape": shape, "layers": layers, "ranks": dist.get_world_size()}
    rows = []
    for name in names:
        ms = {arm: quartiles([it.step_ms for it in times[f"{arm} {name}"]]) for arm in ARMS}
        issued = {arm: quartiles([it.issue_ms for it in times[f"{arm} {name}"]]) for arm in ARMS}
        rows.append(
            {**of_stack, "part": name, "of_bf16": ms["qat"][1] / ms["bf16"][1]}
            | {f"{arm}_ms": ms[arm] for arm in ARMS}
            | {f"{arm}_issue_ms": issued[arm] for arm in ARMS}
        )
    return rows


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
    state = state_of(model)
    if state is not None:
        state.packed_shards.clear()
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
        "micro-batches": MICRO_BATCHES,
        "sequences": SEQUENCES,
        "tokens a sequence": TOKENS[args.device],
        "rounds": args.rounds,
    }
    content = {
        "benchmark": "offloaded_steps",
        **shape_of(settings, COLUMNS, NOTE),
    }
    measured = partial(measure, device=args.device, rounds=args.rounds)
    stacks = STACKS[args.device]
    measure_on_ranks(measured, stacks, args.worlds, args.device, args.record, content)


if __name__ == "__main__":
    run_cli(main)
