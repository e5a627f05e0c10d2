"""What does watching the drift of weights cost, against a training step?

    python -m experiments.benchmarks.drift experiments/records/benchmarks/drift_cpu.json \\
        --study experiments/studies/default.yaml

Trains random weights of a study's models by its GRPO with NVFP4 on both sides and times, after
each step, an observation of all weights, in turns with the step, and the KL of each layer alone.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from experiments.benchmarks.random_model import write_random_checkpoint
from experiments.benchmarks.timing import quartiles, synchronize
from experiments.runs.provenance import origin
from experiments.study.load import load_study
from experiments.study.models import ScratchModel
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from qat_core.arguments import positive_int
from qat_core.drift.layer_kl import layer_kl
from qat_core.drift.log import KL_EVERY, KL_SEQUENCES
from qat_core.drift.monitor import BLOCKS_PER_WEIGHT, DriftMonitor
from qat_core.planning.recipe import Recipe
from qat_core.rl.trainer import GrpoTrainer, TrainerConfig

RECIPE = Recipe()
WARM_UP_STEPS = 2


def run(study_file: Path, model: str, steps: int) -> dict[str, Any]:
    """Seconds of steps and of observations of one model."""
    study = load_study(study_file)
    shape = study.models.get(model)
    if not isinstance(shape, ScratchModel):
        known = [name for name, it in study.models.items() if isinstance(it, ScratchModel)]
        raise ValueError(
            f"--models: {model}: no model of {study_file} with a config of its own; it has "
            f"{', '.join(known) or 'none'}"
        )
    config = json.loads((ROOT / shape.config).read_text())
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        write_random_checkpoint(config, base, seed=0, device=study.device)
        settings = TrainerConfig(
            base_dir=base,
            checkpoint_dir=Path(folder) / "checkpoints",
            train_recipe=RECIPE,
            rollout_recipe=RECIPE,
            task=study.task,
            grpo=study.rl,
            device=study.device,
        )
        return _measure(GrpoTrainer(settings), steps, study.device)


def _measure(trainer: GrpoTrainer, steps: int, device: str) -> dict[str, Any]:
    trainer.coverage().check()
    model = trainer.policy.model
    monitor = DriftMonitor(model, RECIPE)
    ids = torch.randint(2, 18, (KL_SEQUENCES, 80), device=device)
    times: dict[str, list[float]] = {"step_s": [], "observe_s": [], "layer_kl_s": []}
    for step in range(1, WARM_UP_STEPS + steps + 1):
        actions: dict[str, Callable[[], object]] = {
            "step_s": partial(trainer.step, step),
            "observe_s": monitor.observe,
            "layer_kl_s": partial(layer_kl, model, RECIPE, ids, torch.ones_like(ids)),
        }
        for name, action in actions.items():
            synchronize(device)
            start = perf_counter()
            action()
            synchronize(device)
            times[name].append(perf_counter() - start)
    found = {name: quartiles(values[WARM_UP_STEPS:]) for name, values in times.items()}
    step_s, observe_s, layer_kl_s = (found[name][1] for name in times)
    return found | {
        "weights": len(monitor.observe()),
        "blocks_per_weight": BLOCKS_PER_WEIGHT,
        "layer_kl_every": KL_EVERY,
        "observe_of_step": observe_s / step_s,
        "layer_kl_of_step": layer_kl_s / step_s,
        "all_of_step": (observe_s + layer_kl_s / KL_EVERY) / step_s,
    }


def main() -> None:
    """Measures each of the study's models and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--study", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["nano-dense", "nano-moe"])
    parser.add_argument("--steps", type=positive_int, default=8)
    parser.add_argument("--threads", type=positive_int, help="of the CPU; by default all")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    record: dict[str, Any] = {
        "benchmark": "drift",
        **origin(load_study(arguments.study).device),
        "threads": torch.get_num_threads(),
        "models": {},
    }
    for model in arguments.models:
        record["models"][model] = run(arguments.study, model, arguments.steps)
        arguments.record.write_text(json.dumps(record, indent=1, default=dict) + "\n")
        Console().print(model, record["models"][model])


if __name__ == "__main__":
    run_cli(main)
