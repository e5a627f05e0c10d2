"""What does routing replay do to the k3 KL of a mixture of experts, and what does it cost?

    python -m experiments.benchmarks.routing_replay \\
        experiments/records/benchmarks/routing_replay_cpu.json --seeds 0 1 2 3 4

Trains a model of a study by its GRPO without replay, each seed from a base checkpoint of its own.
Before each step the policy scores the step's rollouts twice, without replay and with it: the same
tokens and the same weights. Then, of seed 0, steps of two trainers are timed in turns.
The plan stands in docs/routing_replay.md.
"""

import argparse
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from experiments.base.make import make_base
from experiments.benchmarks.timing import quartiles, time_in_turns
from experiments.rl.policy import Policy
from experiments.rl.trainer import GrpoTrainer, TrainerConfig
from experiments.runs.provenance import origin
from experiments.study.arms import ArmName, make_recipes
from experiments.study.load import load_study
from experiments.study.schema import STUDIES, Run, Study
from experiments.support.cli import run_cli
from experiments.support.json_files import write_json
from qat_core.arguments import positive_int, study_seed
from qat_core.mismatch import k3
from qat_core.rollout.eager import EagerEngine
from qat_core.rollout.engine import Rollouts
from qat_core.routing import capture

ARMS: tuple[ArmName, ...] = ("bf16", "nvfp4-noqat", "nvfp4-qat")
TIMED_SEED, TIMED_ROUNDS = 0, 8


@dataclass
class Tokens:
    """k3 of every sampled token so far, FP64, and of the routes that were not replayed.

    Attributes:
        off, on: without and with replay, a tensor a step.
        rerouted: whether the position that gave the token had other experts in any layer.
    """

    off: list[Tensor] = field(default_factory=list)
    on: list[Tensor] = field(default_factory=list)
    rerouted: list[Tensor] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Of a run: means, tails and the steps."""
        rerouted = torch.cat(self.rerouted)
        off = torch.cat(self.off)
        return {
            "tokens": len(off),
            "rerouted": float(rerouted.double().mean()),
            "k3_share_of_rerouted": float(off[rerouted].sum() / off.sum()),
            "tokens_of_steps": [len(step) for step in self.off],
            "off": _tails(self.off),
            "on": _tails(self.on),
        }


def _tails(steps: list[Tensor]) -> dict[str, Any]:
    tokens = torch.cat(steps)
    return {
        "mean": float(tokens.mean()),
        "p99.9": float(tokens.quantile(0.999)),
        "max": float(tokens.max()),
        "steps": [float(step.mean()) for step in steps],
    }


@torch.no_grad()
def score(policy: Policy, rollouts: Rollouts, found: Tokens, rows_at_once: int) -> None:
    """Adds the rollouts' tokens, scored without replay and with it."""
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    for first in range(0, len(rollouts.input_ids), rows_at_once):
        part = rollouts.select(slice(first, first + rows_at_once))
        with capture(policy.model) as captured:
            policy.replays_routes = False
            parts[False].append(_k3(policy, part))
        found.rerouted.append(_rerouted(part, captured.routes(len(part.input_ids))))
        policy.replays_routes = True
        parts[True].append(_k3(policy, part))
    policy.replays_routes = False
    found.off.append(torch.cat(parts[False]))
    found.on.append(torch.cat(parts[True]))


def _k3(policy: Policy, rollouts: Rollouts) -> Tensor:
    log_probs_BT, _ = policy.log_probs(rollouts)
    return k3((log_probs_BT - rollouts.log_probs)[rollouts.response_mask > 0])


def _rerouted(rollouts: Rollouts, own: Tensor) -> Tensor:
    """Of each sampled token, whether the position before it went to other experts."""
    assert rollouts.routes is not None
    num_tokens = rollouts.response_mask.shape[1]
    ours, engines = (
        routes[:, -num_tokens:].sort(-1).values for routes in (own[:, :-1], rollouts.routes)
    )
    return (ours != engines).any(-1).any(-1)[rollouts.response_mask > 0]


def make_trainer(study: Study, run: Run, folder: Path, routing_replay: bool) -> GrpoTrainer:
    """A run's trainer; its engine returns routes."""
    recipes = make_recipes(run.arm, study.scale_policy, study.block_scale_method)
    trainer = GrpoTrainer(
        TrainerConfig(
            base_dir=folder / study.base_of(run),
            checkpoint_dir=folder / run.id / str(routing_replay) / "checkpoints",
            train_recipe=recipes.train,
            rollout_recipe=recipes.rollout,
            task=study.task,
            grpo=study.rl.model_copy(update={"routing_replay": routing_replay}),
            seed=run.seed,
            device=study.device,
        )
    )
    trainer.coverage().check()
    return trainer


def measure(study: Study, run: Run, folder: Path, steps: int) -> dict[str, Any]:
    """A run's tokens."""
    trainer, found = make_trainer(study, run, folder, routing_replay=False), Tokens()
    assert isinstance(trainer.engine, EagerEngine)
    trainer.engine.returns_routes = True
    rewards = []
    for step in range(1, steps + 1):
        _, rollouts = trainer.sample(step)
        score(trainer.policy, rollouts, found, study.rl.micro_batch_responses)
        rewards.append(trainer.step(step)["critic/score/mean"])
    return {"arm": run.arm, "seed": run.seed, "rewards": rewards, **found.summary()}


def time_steps(study: Study, run: Run, folder: Path) -> dict[str, Any]:
    """Milliseconds of a training step without and with replay, in turns, and their ratio."""
    steps = {}
    for name, routing_replay in (("off", False), ("on", True)):
        trainer = make_trainer(study, run, folder, routing_replay)
        steps[name] = partial(_step, trainer)
    times = time_in_turns(steps, study.device, TIMED_ROUNDS)
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    found = {f"{name}_ms": quartiles(values) for name, values in times.items()}
    return found | {"arm": run.arm, "on_of_off": quartiles(ratios)}


def _step(trainer: GrpoTrainer) -> None:
    trainer.step(1)


def main() -> None:
    """Measures every seed and arm and writes the record after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--study", type=Path, default=STUDIES / "default.yaml")
    parser.add_argument("--model", default="nano-moe")
    parser.add_argument("--seeds", type=study_seed, nargs="+", required=True)
    parser.add_argument("--steps", type=positive_int, help="by default the study's")
    arguments = parser.parse_args()
    seeds = tuple(arguments.seeds)
    study = load_study(arguments.study).model_copy(update={"seeds": seeds, "own_base": True})
    record: dict[str, Any] = {
        "benchmark": "routing_replay",
        **origin(study.device),
        "threads": torch.get_num_threads(),
        "model": arguments.model,
        "runs": [],
        "times": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in seeds:
            runs = [Run(arguments.model, arm, seed) for arm in ARMS]
            base = study.base_of(runs[0])
            make_base(study, base, folder / base)
            for run in runs:
                found = measure(study, run, folder, arguments.steps or study.rl.steps)
                record["runs"].append(found)
                write_json(arguments.record, record)
                brief = {key: (found[key]["mean"], found[key]["p99.9"]) for key in ("off", "on")}
                Console().print(run.id, brief, f"rerouted {found['rerouted']:.4f}")
            if seed == TIMED_SEED:
                record["times"] = [time_steps(study, run, folder) for run in runs]
        write_json(arguments.record, record)


if __name__ == "__main__":
    run_cli(main)
