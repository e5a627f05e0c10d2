"""Training step of fake-quantized layers, on one device or under FSDP2, against BF16 and verl's.

On one device all arms read the same weights, as no step changes them. With `--worlds` FSDP2 shards
FP32 masters with BF16 compute, every decoder layer a group of its own: with few tokens a rank
communication decides, and on many hosts the CPU. So compiled layers are measured there too, without
verl's, which was not made for torch.compile.
"""

import argparse
import gc
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.multiprocessing.spawn import spawn

from experiments.benchmarks.qat_layers import (
    QAT_ARMS,
    apply_arm,
    arms,
    exact_arms,
    layer_stack,
    shard,
    step_inputs,
)
from experiments.benchmarks.ranks import join_ranks, require_gpus_for
from experiments.benchmarks.records import Column, Row, Setting, shape_of
from experiments.benchmarks.timing import allow_split_sums, summary, time_steps
from experiments.runs.provenance import origin
from experiments.support.gpu_locks import require_device
from experiments.support.json_files import read_json, write_json
from qat_core.exact import is_exact
from qat_core.exact.operators import forbid_split_sums
from qat_core.training.preparation import state_of
from qat_core.units import BYTES_PER_GIB

SEQUENCES = 4  # on one device; a rank has one
TOKENS = {"cuda": 2048, "cpu": 16}  # of a sequence
SCALES_KNOWN = ", scales known"
CHECKPOINTING, COMPILED = "gradient checkpointing", "compiled"
# This project's own goals on one device: a step of QAT over BF16's, at most, by shape.
GOALS = {"qwen3-8b": 1.01, "qwen3-30b-a3b": 1.05}
EXACT_GOALS = {"qwen3-8b": 1.03, "qwen3-30b-a3b": 1.08, "smollm2-135m": 1.25}
COLUMNS = {
    "shape": Column(heading="Shape"),
    "layers": Column(heading="Layers"),
    "ranks": Column(heading="GPUs"),
    "setting": Column(heading="Setting"),
    "arm": Column(heading="Arm"),
    "step_ms": Column(heading="Step, ms", format=".0f"),
    "issue_ms": Column(heading="issued, ms", format=".0f"),
    "ratio": Column(heading="of BF16's", format=".3f"),
    "ratio_by_round": Column(heading="by round", format=".3f"),
    "goal": Column(heading="Goal", format="g", bounds="ratio"),
    "peak_ratio": Column(heading="Peak memory, of BF16's", format=".3f"),
    "held_gib": Column(heading="Weights or packed shards, and what is kept, GiB", format=".1f"),
}
NOTE = (
    "A step is forward and backward of a micro-batch; medians, in brackets quartiles. Issued: when "
    "the CPU has queued all of the step; where that is nearly the whole step, GPUs wait for the "
    "CPU. The arms of QAT: the first after an optimizer step, with new scales, where what is kept "
    "is packed or rounded; scales known: any other. QAT packed and rounded: `prepare(keep=...)`. "
    "verl's QATLinear leaves the experts of an MoE in BF16. Exact: vLLM's exact engine's bits. "
    "A goal is judged before rounding. Peak "
    "memory: weights included, but where FSDP2 shards them packed shards alone."
)
# Shape, layers, settings. On one device 3, 19 and 0.2 GiB of BF16 weights.
Stack = tuple[str, int, str]
STACKS: dict[tuple[str, bool], list[Stack]] = {
    ("cuda", False): [
        (shape, layers, setting)
        for shape, layers in (("qwen3-8b", 8), ("qwen3-30b-a3b", 16), ("smollm2-135m", 30))
        for setting in ("", CHECKPOINTING)
    ],
    ("cuda", True): [("qwen3-8b", 8, COMPILED), ("qwen3-8b", 8, ""), ("qwen3-30b-a3b", 4, "")],
    ("cpu", False): [("nano-dense", 2, ""), ("nano-moe", 2, CHECKPOINTING)],
    ("cpu", True): [("nano-dense", 2, COMPILED), ("nano-moe", 2, "")],
}


class Options(NamedTuple):
    """Of a measurement; a process of many has `sharded` weights."""

    record: Path
    device: str
    rounds: int
    tokens: int
    sharded: bool


def measure(stack: Stack, options: Options) -> list[Row]:
    """Times, ratios and memory of all arms of a stack, on every rank."""
    gc.collect()  # the models of the stack before
    (shape, layers, setting), device = stack, options.device
    steps, models = {}, {}
    dtype = torch.float32 if options.sharded else torch.bfloat16
    every = [*arms(sharded=options.sharded), *exact_arms(shape, sharded=options.sharded)]
    for arm in ["bf16", "qat"] if setting == COMPILED else every:
        models[arm] = model = layer_stack(shape, layers, device, dtype)
        if not options.sharded:
            for own, shared in zip(model.parameters(), models["bf16"].parameters(), strict=True):
                own.data = shared.data  # equal, and read by all arms
        changed = apply_arm(model, arm)
        if setting == CHECKPOINTING:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if setting == COMPILED:
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile()
        if options.sharded:
            shard(model, model.layers)  # type: ignore[arg-type]
        sequences = 1 if options.sharded else SEQUENCES
        x, grad = step_inputs(model, sequences, options.tokens, device)
        steps[arm] = partial(step, model, changed, x, grad)
        if arm in QAT_ARMS:
            steps[arm + SCALES_KNOWN] = partial(step, model, lambda: None, x, grad)
    result = summary(time_steps(steps, device, options.rounds))
    for arm, figures in result.items():
        held = held_bytes(models[arm.removesuffix(SCALES_KNOWN)], options)
        figures["held_gib"] = held / BYTES_PER_GIB
        figures["peak_gib"] = (held + peak_bytes(steps[arm], device)) / BYTES_PER_GIB
    bf16_gib = max(result["bf16"]["peak_gib"], 1e-9)
    ranks = dist.get_world_size() if options.sharded else None
    of_stack: Row = {"shape": shape, "layers": layers, "ranks": ranks, "setting": setting}
    goals = dict.fromkeys(("exact qat", "exact qat rounded"), EXACT_GOALS.get(shape))
    if not options.sharded:
        goals |= dict.fromkeys(QAT_ARMS, GOALS.get(shape))
    return [
        {**of_stack, "arm": arm, "goal": goals.get(arm)}
        | {"peak_ratio": figures["peak_gib"] / bf16_gib, **figures}
        for arm, figures in result.items()
    ]


def step(model: nn.Module, changed: Any, x: torch.Tensor, grad: torch.Tensor) -> None:
    """One training step after a change of the weights; leaves no gradients behind."""
    (forbid_split_sums if is_exact(model) else allow_split_sums)()
    changed()
    model(inputs_embeds=x, use_cache=False).last_hidden_state.backward(grad)
    x.grad = None
    model.zero_grad(set_to_none=True)


def held_bytes(model: nn.Module, options: Options) -> int:
    """What a step keeps for the next: packed shards, or weights and what is kept; 0 on a CPU."""
    state = state_of(model)
    if options.device != "cuda":
        return 0
    if options.sharded:
        return sum(it.nbytes for it, _ in state.packed_shards.values()) if state else 0
    kept = 0 if state is None else state.kept.num_bytes
    return kept + sum(weight.nbytes for weight in model.parameters())


def peak_bytes(step: Any, device: str) -> int:
    """What one step allocates at most on top of what lies there; 0 on a CPU."""
    if device != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_all(options: Options, rank: int = 0) -> None:
    """Adds the rows of each stack to the record, after each, on the first rank."""
    for stack in STACKS[options.device, options.sharded]:
        rows = measure(stack, options)
        if rank == 0:
            Console().print_json(data=rows)
            content = read_json(options.record)
            write_json(options.record, content | {"rows": [*content["rows"], *rows]})


def _measure_on_rank(rank: int, world: int, folder: str, options: Options) -> None:
    join_ranks(rank, world, folder, options.device)
    measure_all(options, rank)
    dist.destroy_process_group()


def main(args: argparse.Namespace) -> None:
    """Measures all stacks, for each number of ranks, and writes the record."""
    require_device(args.device)
    require_gpus_for("--worlds", args.worlds, args.device)
    tokens = args.tokens or TOKENS[args.device]
    options = Options(args.record, args.device, args.rounds, tokens, bool(args.worlds))
    settings: dict[str, Setting] = {
        "sequences": 1 if args.worlds else SEQUENCES,
        "tokens a sequence": tokens,
        "rounds": args.rounds,
        "verl": "measured" if "verl" in arms() else "not on the path, not measured",
    }
    name = "fsdp" if args.worlds else "parameter"
    record = {"benchmark": name, **origin(args.device), **shape_of(settings, COLUMNS, NOTE)}
    args.record.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.record, {**record, "rows": []})
    if not args.worlds:
        measure_all(options)
    for world in args.worlds:
        with tempfile.TemporaryDirectory() as folder:
            spawn(_measure_on_rank, (world, folder, options), nprocs=world)  # type: ignore[no-untyped-call]
