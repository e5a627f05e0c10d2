"""Training step of fake-quantized layers under FSDP2, against BF16 and verl's QATLinear.

    python -m experiments.benchmarks.fsdp RECORD.json --worlds 2 4 [--device cuda] [--rounds 10]
        [--tokens 2048]

FP32 masters, BF16 compute, every decoder layer a group of its own. With 2,048 tokens a rank, as by
default, communication decides, and on many hosts the CPU; with more the GPU sets the pace. One step
is forward and backward; the arm `qat` recomputes the global scales and packs its shards, as after
an optimizer step, `qat, scales known` is any further micro-batch. Eager layers of this size keep
the CPU busy rather than the GPU, so compiled ones are measured too (without verl's, which was not
made for torch.compile). Peak memory is what a step allocates, and the packed shards that lie there
from one step to the next; sharded weights are not in it. The record is written after each stack.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn

from experiments.benchmarks.parameter import SCALES_KNOWN, peak_of, step
from experiments.benchmarks.qat_layers import apply_arm, arms, layer_stack, step_inputs
from experiments.benchmarks.records import Column, Row, Setting, shape_of
from experiments.benchmarks.timing import summary, time_steps
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import read_json, write_json
from qat_core.arguments import positive_int
from qat_core.training.preparation import scales_of
from qat_core.units import BYTES_PER_GIB

BACKEND = {"cuda": "nccl", "cpu": "gloo"}
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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
    """Times, ratios and memory of all arms of one stack; the same call on every rank."""
    steps, models = {}, {}
    for arm in ["bf16", "qat"] if compiled else arms(sharded=True):
        models[arm] = model = layer_stack(shape, layers, device, torch.float32)
        changed = apply_arm(model, arm)
        if compiled:
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile()
        shard(model)
        x, grad = step_inputs(model, 1, tokens, device)
        steps[arm] = partial(step, model, changed, x, grad)
        if arm == "qat":
            steps[arm + SCALES_KNOWN] = partial(step, model, lambda: None, x, grad)
    result = summary(time_steps(steps, device, rounds))
    for arm in result:
        held = packed_shards_bytes(models[arm.removesuffix(SCALES_KNOWN)])
        result[arm]["packed_shards_gib"] = held / BYTES_PER_GIB
        result[arm]["peak_gib"] = (held + peak_of(steps[arm], device)) / BYTES_PER_GIB
    bf16_gib = max(result["bf16"]["peak_gib"], 1e-9)
    stack: Row = {"shape": shape, "layers": layers, "ranks": dist.get_world_size()}
    stack |= {"setting": "compiled" if compiled else ""}
    return [
        {**stack, "arm": arm, "peak_ratio": it["peak_gib"] / bf16_gib, **it}
        for arm, it in result.items()
    ]


def shard(model: nn.Module) -> None:
    """Make each decoder layer and the rest FSDP2 groups."""
    for part in (*model.layers, model):  # type: ignore[misc]
        fully_shard(part, mp_policy=POLICY)


def packed_shards_bytes(model: nn.Module) -> int:
    """What this rank keeps packed of its shards after a step; 0 where nothing is quantized."""
    scales = scales_of(model)
    shards = scales.packed_shards.values() if scales else ()
    return sum(buffer.nbytes for buffer, _ in shards)


def measure_on_ranks(world: int, device: str, record: Path, rounds: int, tokens: int) -> None:
    """Adds what the first rank finds of each stack to the record's rows, stack by stack."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, device, f"{folder}/rendezvous", record, rounds, tokens)
        spawn(_rank, arguments, nprocs=world)  # type: ignore[no-untyped-call]


def _rank(
    rank: int,
    world: int,
    device: str,
    rendezvous: str,
    record: Path,
    rounds: int,
    tokens: int,
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        BACKEND[device], init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    for stack in STACKS[device]:
        rows = measure(*stack, device, rounds, tokens)
        if rank == 0:
            Console().print_json(data=rows)
            content = read_json(record)
            write_json(record, content | {"rows": [*content["rows"], *rows]})
    dist.destroy_process_group()


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
    if args.device == "cuda" and torch.cuda.device_count() < max(args.worlds):
        raise ValueError(
            f"--worlds: {max(args.worlds)}: there are {torch.cuda.device_count()} CUDA GPUs; name "
            "fewer, or rehearse with --device cpu"
        )
    tokens = args.tokens or TOKENS[args.device]
    settings: dict[str, Setting] = {
        "tokens a rank": tokens,
        "rounds": args.rounds,
        "verl": "measured" if "verl" in arms() else "not on the path, not measured",
    }
    shape = shape_of(settings, COLUMNS, NOTE)
    args.record.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.record, {"benchmark": "fsdp", **shape, **origin(args.device), "rows": []})
    for world in args.worlds:
        measure_on_ranks(world, args.device, args.record, args.rounds, tokens)


if __name__ == "__main__":
    run_cli(main)
