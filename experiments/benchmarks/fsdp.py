"""Training step of fake-quantized layers under FSDP2, against BF16 and verl's QATLinear.

    python -m experiments.benchmarks.fsdp RECORD.json --worlds 2 4 [--device cuda] [--rounds 10]
        [--tokens 2048]

FP32 masters, BF16 compute, every decoder layer a group of its own. With 2,048 tokens a rank, as by
default, communication decides, and on many hosts the CPU; with more the GPU sets the pace. One step
is forward and backward; the arm `qat` recomputes the global scales and packs its shards, as after
an optimizer step, `qat, scales known` is any further micro-batch. Eager layers of this size keep
the CPU busy rather than the GPU, so compiled ones are measured too (without verl's, which was not
made for torch.compile). Bytes are those that each rank hands to all-gathers; their time is what the
profiler saw of NCCL's kernels. Peak memory is what a step allocates, and the packed shards that lie
there from one step to the next. The record is written after each stack.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.benchmarks.parameter import SCALES_KNOWN, step
from experiments.benchmarks.qat_layers import apply_arm, arms, layer_stack, step_inputs
from experiments.benchmarks.records import Column, Row, shape_of
from experiments.benchmarks.sharded import measure_on_ranks, shard
from experiments.benchmarks.timing import quartiles, summary, time_steps
from experiments.support.cli import run_cli
from qat_core.arguments import positive_int
from qat_core.training.parameter import FakeQuantizedTensor
from qat_core.training.preparation import state_of
from qat_core.units import BYTES_PER_GIB

COLUMNS = {
    "shape": Column(heading="Shape"),
    "layers": Column(heading="Layers"),
    "ranks": Column(heading="GPUs"),
    "setting": Column(heading="Setting"),
    "arm": Column(heading="Arm"),
    "step_ms": Column(heading="Step, ms", format=".0f"),
    "issue_ms": Column(heading="issued, ms", format=".0f"),
    "ratio": Column(heading="of BF16's", format=".3f"),
    "peak_ratio": Column(heading="Peak memory, of BF16's", format=".3f"),
}
NOTE = (
    "Under FSDP2. Issued: when the CPU has queued all of the step; where that is nearly the whole "
    "step, GPUs wait for the CPU. Ratios are of medians. Peak memory: packed shards included, "
    "sharded weights not."
)
TOKENS = {"cuda": 2048, "cpu": 16}  # a rank
# Shape, layers, whether the layers are compiled, which takes the CPU out of the measurement.
STACKS = {
    "cuda": [("qwen3-8b", 8, True), ("qwen3-8b", 8, False), ("qwen3-30b-a3b", 4, False)],
    "cpu": [("tiny", 2, True), ("tiny-moe", 2, False)],
}


def measure(
    shape: str, layers: int, compiled: bool, device: str, rounds: int, tokens: int
) -> list[Row]:
    """Times, ratios and all-gathers of all arms of one stack; the same call on every rank."""
    steps, rounded, models = {}, {}, {}
    for arm in ["bf16", "qat"] if compiled else arms(sharded=True):
        models[arm] = model = layer_stack(shape, layers, device, torch.float32)
        changed = apply_arm(model, arm)
        if arm == "qat":
            rounded = rounded_weights(model)
        if compiled:
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile()
        shard(model)
        if arm == "qat":
            bit_identical = gathers_exactly(model, rounded)
        x, grad = step_inputs(model, 1, tokens, device)
        steps[arm] = partial(step, model, changed, x, grad)
        if arm == "qat":
            steps[arm + SCALES_KNOWN] = partial(step, model, lambda: None, x, grad)
    times = time_steps(steps, device, rounds)
    result = summary({arm: [time.step_ms for time in of_arm] for arm, of_arm in times.items()})
    for arm in result:
        result[arm]["issue_ms"] = quartiles([time.issue_ms for time in times[arm]])
        with SentBytes() as sent:
            steps[arm]()
        result[arm]["all_gather_mib_per_rank"] = sent.total / 2**20
        result[arm] |= nccl_ms(steps[arm]) if device == "cuda" else {}
        held = packed_shards_gib(models[arm.removesuffix(SCALES_KNOWN)])
        result[arm]["packed_shards_gib"] = held
        result[arm]["peak_gib"] = held + (peak_gib(steps[arm]) if device == "cuda" else 0.0)
    bf16_gib = max(result["bf16"]["peak_gib"], 1e-9)
    stack: Row = {"shape": shape, "layers": layers, "ranks": dist.get_world_size()}
    stack |= {"setting": "compiled" if compiled else ""}
    stack |= {"gathered_weights_bit_identical_to_one_device": bit_identical}
    return [
        {**stack, "arm": arm, "peak_ratio": it["peak_gib"] / bf16_gib, **it}
        for arm, it in result.items()
    ]


def rounded_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """BF16 values of the first layer's quantized weights as one device would round them."""
    return {
        name: parameter.rounded().bfloat16()
        for name, parameter in model.layers[0].named_parameters()  # type: ignore[index, union-attr]
        if isinstance(parameter, FakeQuantizedTensor)
    }


def gathers_exactly(model: nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    """Whether the first layer's all-gather brings the expected weights, bit for bit.

    Looks twice: from the second time on FSDP2 uses the memory of the first.
    """
    layer: Any = model.layers[0]  # type: ignore[index]
    equal = bool(expected)
    for _ in range(2):
        layer.unshard()
        gathered = dict(layer.named_parameters())
        equal &= all(torch.equal(gathered[name], value) for name, value in expected.items())
        layer.reshard()
    return equal


class SentBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that this rank copies into FSDP2's all-gathers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at the inputs of the copy-in, runs everything."""
        if func is torch.ops.fsdp.all_gather_copy_in.default:
            self.total += sum(piece.nbytes for piece in args[0])
        return func(*args, **(kwargs or {}))


def nccl_ms(call: partial[None]) -> dict[str, float]:
    """GPU ms of NCCL's kernels in one step by collective, waiting for other ranks included."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return {
        f"{collective}_ms": sum(
            event.device_time_total
            for event in trace.key_averages()
            if "nccl" in event.key and collective in event.key
        )
        / 1e3
        for collective in ("AllGather", "ReduceScatter", "AllReduce")
    }


def packed_shards_gib(model: nn.Module) -> float:
    """What this rank keeps packed of its shards after a step; 0 where nothing is quantized."""
    state = state_of(model)
    shards = state.packed_shards.values() if state else ()
    return sum(buffer.nbytes for buffer, _ in shards) / BYTES_PER_GIB


def peak_gib(call: partial[None]) -> float:
    """What one step allocates at most on top of what lies there, sharded weights not included."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / BYTES_PER_GIB


def main() -> None:
    """Measures every world size and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--worlds", type=positive_int, nargs="+", default=[2, 4])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=positive_int, default=10)
    parser.add_argument(
        "--tokens", type=positive_int, help="of a rank; by default 2,048, on a CPU 16"
    )
    args = parser.parse_args()
    tokens = args.tokens or TOKENS[args.device]
    settings: dict[str, str | int | float] = {
        "tokens a rank": tokens,
        "rounds": args.rounds,
        "verl": "measured" if "verl" in arms() else "not on the path, not measured",
    }
    content = {"benchmark": "fsdp", **shape_of(settings, COLUMNS, NOTE)}
    measured = partial(measure, device=args.device, rounds=args.rounds, tokens=tokens)
    stacks = STACKS[args.device]
    measure_on_ranks(measured, stacks, args.worlds, args.device, args.record, content)


if __name__ == "__main__":
    run_cli(main)
