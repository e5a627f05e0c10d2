"""What could a weight sync leave out? Blocks whose bytes changed from one RL step to the next.

    python -m experiments.benchmarks.changed_blocks \\
        experiments/records/benchmarks/changed_blocks_cpu.json \\
        --checkpoints experiments/studies/default.yaml:results/base/nano-dense --lr 1e-6 1e-5 1e-4

Trains checkpoints by the GRPO of their study, trainer and rollout in NVFP4, at several learning
rates and compares the streams of successive syncs. A delta would carry the blocks that differ, with
a 4-byte index each: 9 bytes of NVFP4 or 16 BF16 values.

qat_core sends no deltas. In one process a sync sends nothing: its time goes into packing, which a
delta needs too, and into vLLM's layer-wise repacking. The engine keeps only Marlin's layout, in
which a block's codes share 32-bit words with another row's and its scale a factor with its whole
layer; so a receiver either keeps the packed weights a second time, as does the sender to find the
difference, or writes into Marlin's layout by itself. With the former, every layer that a delta
touches is repacked whole: `touched_weights` counts them, of weights far smaller than Qwen3-8B's.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from experiments.runs.provenance import hardware, versions
from experiments.study.load import load_study
from experiments.support.cli import run_cli
from qat_core.nvfp4 import PackedTensor
from qat_core.options import BLOCK_SIZE
from qat_core.recipe import Recipe
from qat_core.rl.trainer import GrpoTrainer, TrainerConfig
from qat_core.weights.hub_names import Weight
from qat_core.weights.stream import weight_stream

INDEX_BYTES = 4
NVFP4_BLOCK_BYTES, BF16_BLOCK_BYTES = 9, 32
RECIPE = Recipe.full()


def run(study_file: Path, checkpoint: Path, lr: float, steps: int) -> list[dict[str, Any]]:
    """What each step of a run changed."""
    study = load_study(study_file)
    config = study.rl.model_copy(update={"lr": lr, "steps": steps})
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainerConfig(
            base_dir=checkpoint,
            checkpoint_dir=Path(folder),
            train_recipe=RECIPE,
            rollout_recipe=RECIPE,
            task=study.task,
            grpo=config,
            device=study.device,
        )
        trainer = GrpoTrainer(settings)
        trainer.coverage().check()
        sent, changes = _sent(trainer), []
        for step in range(1, steps + 1):
            trainer.step(step)
            before, sent = sent, _sent(trainer)
            changes.append(compare(before, sent))
    return changes


def _sent(trainer: GrpoTrainer) -> dict[str, Weight]:
    stream = weight_stream(trainer.policy.model, trainer.plan, RECIPE)
    return {
        name: weight if isinstance(weight, PackedTensor) else weight.clone()
        for name, weight in stream
    }


def compare(before: dict[str, Weight], after: dict[str, Weight]) -> dict[str, Any]:
    """Blocks, those that changed and what they take, of NVFP4 and of BF16 weights."""
    start = perf_counter()
    figures: dict[str, Any] = {"full_bytes": sum(weight.nbytes for weight in after.values())}
    delta_bytes = 0
    for kind, block_bytes in ((PackedTensor, NVFP4_BLOCK_BYTES), (Tensor, BF16_BLOCK_BYTES)):
        changed = {n: _changed(before[n], w) for n, w in after.items() if isinstance(w, kind)}
        num_blocks = sum(mask.numel() for mask in changed.values())
        num_changed = sum(int(mask.sum()) for mask in changed.values())
        delta_bytes += num_changed * (block_bytes + INDEX_BYTES)
        figures["nvfp4" if kind is PackedTensor else "bf16"] = {
            "weights": len(changed),
            "touched_weights": sum(bool(mask.any()) for mask in changed.values()),
            "blocks": num_blocks,
            "changed_blocks": num_changed,
            "changed_fraction": num_changed / num_blocks,
        }
    return figures | {"delta_bytes": delta_bytes, "compare_s": perf_counter() - start}


def _changed(before: Weight, after: Weight) -> Tensor:
    """Which blocks of a weight have other bytes, (number of blocks,)."""
    pairs = zip(_block_bytes(before), _block_bytes(after), strict=True)
    return torch.cat([old != new for old, new in pairs], 1).any(1)


def _block_bytes(weight: Weight) -> tuple[Tensor, ...]:
    """Bytes of each block, a row each; a block of BF16 values is as many as one of NVFP4."""
    if not isinstance(weight, PackedTensor):
        return (weight.reshape(-1, BLOCK_SIZE).view(torch.uint8),)
    codes = weight.codes.reshape(-1, BLOCK_SIZE // 2)
    return codes, weight.block_scale.reshape(-1, 1).view(torch.uint8)


def main() -> None:
    """Trains every checkpoint at every learning rate and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--checkpoints", nargs="+", required=True, metavar="STUDY:FOLDER")
    parser.add_argument("--lr", nargs="+", type=float, required=True)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "benchmark": "changed_blocks",
        "hardware": hardware("cpu"),
        "versions": versions(),
        "models": {},
    }
    for name in arguments.checkpoints:
        study_file, _, checkpoint = name.partition(":")
        figures = record["models"].setdefault(Path(checkpoint).name, {})
        for lr in arguments.lr:
            figures[f"{lr:g}"] = run(Path(study_file), Path(checkpoint), lr, arguments.steps)
            arguments.record.write_text(json.dumps(record, indent=1) + "\n")
            Console().print(Path(checkpoint).name, lr, figures[f"{lr:g}"][-1])


if __name__ == "__main__":
    run_cli(main)
