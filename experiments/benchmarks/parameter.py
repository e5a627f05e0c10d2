"""Training step of fake-quantized layers on one device, against BF16 and verl's QATLinear.

    python -m experiments.benchmarks.parameter RECORD.json [--device cuda] [--rounds 10]

A step is forward and backward of a stack of decoder layers over 8,192 tokens, gradient
checkpointing off and on. Each step of the arms `qat` recomputes the global scales, and rounds or
packs again the weights that are kept, as the first one after an optimizer step does; `scales known`
is any further micro-batch. Peak memory is what the step allocates on top of what lies there, the
arm's weights and what it keeps of them included. All arms read the same weights, as no step changes
them: those of Qwen3-30B-A3B, what two arms keep and a step take 70 GiB. The record is written after
each stack.
"""

import argparse
import gc
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from experiments.benchmarks.device import require_device
from experiments.benchmarks.qat_layers import QAT_ARMS, apply_arm, arms, layer_stack, step_inputs
from experiments.benchmarks.records import Column, Row, shape_of
from experiments.benchmarks.timing import summary, time_in_turns
from experiments.runs.provenance import origin
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from qat_core.arguments import positive_int
from qat_core.training.preparation import state_of
from qat_core.units import BYTES_PER_GIB

SEQUENCES, TOKENS = 4, 2048
SCALES_KNOWN = ", scales known"
# This project's own goals: a step of QAT over BF16's, at most, by shape.
GOALS = {"qwen3-8b": 1.01, "qwen3-30b-a3b": 1.05}
COLUMNS = {
    "shape": Column(heading="Shape"),
    "layers": Column(heading="Layers"),
    "setting": Column(heading="Setting"),
    "arm": Column(heading="Arm"),
    "step_ms": Column(heading="Step, ms", format=".0f"),
    "ratio": Column(heading="of BF16's", format=".3f"),
    "ratio_by_round": Column(heading="by round", format=".3f"),
    "goal": Column(heading="Goal", format="g", bounds="ratio"),
    "peak_ratio": Column(heading="Peak memory, of BF16's", format=".3f"),
    "weights_gib": Column(heading="Weights and what is kept, GiB", format=".1f"),
}
NOTE = (
    "A step is forward and backward of a micro-batch; medians, in brackets quartiles. The arms of "
    "QAT: the first after an optimizer step, with new scales, where what is kept is packed or "
    "rounded; scales known: any other. QAT packed and rounded: `prepare(keep=...)`. verl's "
    "QATLinear leaves the experts of an MoE in BF16. A goal is judged before rounding. Peak "
    "memory: weights included."
)
# Shape, layers: 3, 19 and 0.2 GiB of BF16 weights.
STACKS = {
    "cuda": [("qwen3-8b", 8), ("qwen3-30b-a3b", 16), ("smollm2-135m", 30)],
    "cpu": [("tiny", 2), ("tiny-moe", 2)],
}


def measure(shape: str, layers: int, checkpointing: bool, device: str, rounds: int) -> list[Row]:
    """Times, ratios and peak memory of all arms of one stack."""
    gc.collect()  # the models of the stack before
    models, steps = {}, {}
    for arm in arms():
        models[arm] = layer_stack(shape, layers, device, torch.bfloat16)
        share_weights(models[arm], models["bf16"])
        changed = apply_arm(models[arm], arm)
        if checkpointing:
            models[arm].gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        x, grad = step_inputs(models[arm], SEQUENCES, TOKENS if device == "cuda" else 16, device)
        steps[arm] = partial(step, models[arm], changed, x, grad)
        if arm in QAT_ARMS:
            steps[arm + SCALES_KNOWN] = partial(step, models[arm], lambda: None, x, grad)
    result = summary(time_in_turns(steps, device, rounds))
    for arm in result:
        peak = peak_of(steps[arm], device)
        held = held_bytes(models[arm.removesuffix(SCALES_KNOWN)], device)
        result[arm]["peak_gib"] = (peak + held) / BYTES_PER_GIB
        result[arm]["weights_gib"] = held / BYTES_PER_GIB
    for arm in result:
        result[arm]["peak_ratio"] = result[arm]["peak_gib"] / max(result["bf16"]["peak_gib"], 1e-9)
    experts = getattr(models["bf16"].config, "_experts_implementation", None)
    stack: Row = {"shape": shape, "layers": layers, "experts_implementation": experts}
    stack["setting"] = "gradient checkpointing" if checkpointing else ""
    return [
        {**stack, "arm": arm, "goal": GOALS.get(shape) if arm in QAT_ARMS else None, **values}
        for arm, values in result.items()
    ]


def share_weights(model: nn.Module, other: nn.Module) -> None:
    """Let `model` read the weights of `other`, which has the same, instead of its own."""
    for own, shared in zip(model.parameters(), other.parameters(), strict=True):
        own.data = shared.data


def step(model: nn.Module, changed: Any, x: torch.Tensor, grad: torch.Tensor) -> None:
    """One training step after a change of the weights; leaves no gradients behind."""
    changed()
    model(inputs_embeds=x, use_cache=False).last_hidden_state.backward(grad)
    x.grad = None
    model.zero_grad(set_to_none=True)


def held_bytes(model: nn.Module, device: str) -> int:
    """Bytes of the weights, and of what a step keeps of them for the next; 0 on a CPU."""
    state = state_of(model)
    kept = 0 if state is None else state.kept.num_bytes
    weights = sum(weight.nbytes for weight in model.parameters())
    return weights + kept if device == "cuda" else 0


def peak_of(step: Any, device: str) -> int:
    """Bytes that one step allocates at most on top of what lies there."""
    if device != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Measures all stacks and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=positive_int, default=10)
    args = parser.parse_args()
    require_device(args.device)
    settings: dict[str, str | int | float] = {
        "sequences": SEQUENCES,
        "tokens a sequence": TOKENS if args.device == "cuda" else 16,
        "rounds": args.rounds,
        "verl": "measured" if "verl" in arms() else "not on the path, not measured",
    }
    record = {
        "benchmark": "parameter",
        **origin(args.device),
        **shape_of(settings, COLUMNS, NOTE),
        "rows": [],
    }
    args.record.parent.mkdir(parents=True, exist_ok=True)
    for shape, layers in STACKS[args.device]:
        for checkpointing in (False, True):
            result = measure(shape, layers, checkpointing, args.device, args.rounds)
            Console().print_json(data=result)
            record["rows"] += result
            write_json(args.record, record)


if __name__ == "__main__":
    run_cli(main)
