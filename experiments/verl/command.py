"""`python -m experiments.verl.command`: the command that trains a run of a study with verl.

A pure function of the study, its recipe and the places of the run's files.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from experiments.study.arms import ARMS
from experiments.study.load import load_study
from experiments.study.schema import Run, Study
from experiments.study.verl_settings import Setting
from experiments.support.cli import RESULTS, RUN, STUDY, run_cli
from experiments.verl.overrides import SEARCH_PATH, to_override
from qat_core.rl.config import GrpoConfig

FROM_STUDY = "the study"


class Places(NamedTuple):
    """Where a run reads and writes; all absolute, or below the working directory."""

    repository: Path
    model: Path
    data: Path
    checkpoints: Path
    attempt: Path

    @property
    def metrics(self) -> Path:
        """verl's own record of the steps."""
        return self.attempt / "verl.jsonl"

    @property
    def ledger(self) -> Path:
        """Which weights are trained, packed and served in which precision."""
        return self.attempt / "ledger.json"


class Command(NamedTuple):
    """Arguments, and what the environment holds besides."""

    arguments: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """A line of shell, broken after each part."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        program, overrides = self.arguments[:3], self.arguments[3:]
        parts = [*variables, shlex.join(program), *map(shlex.quote, overrides)]
        return " \\\n  ".join(parts)


def places(study: Study, run: Run, repository: Path, results: Path, attempt: Path) -> Places:
    """The places of a run of a study."""
    return Places(
        repository=repository,
        model=results / "base" / run.model,
        data=results / "data" / study.study,
        checkpoints=results / run.id / "checkpoints",
        attempt=attempt,
    )


def build_command(study: Study, run: Run, where: Places) -> Command:
    """How verl is called for a run.

    Raises:
        ValueError: the recipe sets what comes from the study.
    """
    settings = run_settings(study, run, where)
    ordered = sorted(settings, key=lambda key: (not key.startswith("+"), key))
    overrides = [to_override(key, settings[key].value) for key in ordered]
    hydra = [SEARCH_PATH, to_override("hydra.run.dir", str(where.attempt / "hydra"))]
    arguments = ["python", "-m", "verl.trainer.main_ppo", *hydra, *overrides]
    return Command(arguments, _environment(study, where))


def run_settings(study: Study, run: Run, where: Places) -> dict[str, Setting]:
    """All that a run sets in verl, by key.

    Raises:
        ValueError: the recipe sets what comes from the study.
    """
    recipe = study.recipe_of(run)
    own = _training(study.rl) | _seeds(run.seed) | _precision(study, run)
    own |= _files(study, run, where)
    for key in own:
        if key in recipe:
            raise ValueError(f"{recipe[key].source}: {key}: comes from the study; remove it here")
    return recipe | {key: Setting(value, FROM_STUDY) for key, value in own.items()}


def _training(rl: GrpoConfig) -> dict[str, Any]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens = rl.rollout.max_prompt_tokens + rl.rollout.max_response_tokens
    return {
        "trainer.total_training_steps": rl.steps,
        "trainer.save_freq": rl.save_every,
        "data.train_batch_size": rl.prompts_per_step,
        "data.max_prompt_length": rl.rollout.max_prompt_tokens,
        "data.max_response_length": rl.rollout.max_response_tokens,
        f"{rollout}.n": rl.responses_per_prompt,
        f"{rollout}.temperature": rl.rollout.temperature,
        f"{rollout}.top_p": rl.rollout.top_p,
        f"{rollout}.top_k": rl.rollout.top_k,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": rl.micro_batch_responses,
        f"{actor}.ppo_mini_batch_size": rl.mini_batch_prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": rl.micro_batch_responses,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        f"{actor}.clip_ratio_low": rl.clip_ratio_low,
        f"{actor}.clip_ratio_high": rl.clip_ratio_high,
        f"{actor}.clip_ratio_c": rl.clip_ratio_c,
        f"{actor}.grad_clip": rl.grad_clip,
        f"{actor}.optim.clip_grad": rl.grad_clip,  # the one that FSDP reads
        f"{actor}.optim.lr": rl.lr,
        f"{actor}.optim.weight_decay": rl.weight_decay,
        "algorithm.rollout_correction.rollout_is_threshold": rl.rollout_is_threshold,
    }


def _seeds(seed: int) -> dict[str, Any]:
    return {
        "data.seed": seed,
        "actor_rollout_ref.rollout.seed": seed,
        "actor_rollout_ref.actor.data_loader_seed": seed,
        "actor_rollout_ref.actor.fsdp_config.seed": seed,
    }


def _precision(study: Study, run: Run) -> dict[str, Any]:
    if ARMS[run.arm].rollout_recipe is None:
        return {}
    qat = "actor_rollout_ref.actor.fsdp_config.qat"
    return {f"{qat}.scale": study.scale_policy, f"{qat}.block_scale": study.block_scale_method}


def _files(study: Study, run: Run, where: Places) -> dict[str, Any]:
    return {
        **({"+platform": "cpu"} if study.device == "cpu" else {}),
        "actor_rollout_ref.model.path": str(where.model),
        "data.train_files": str(where.data / "train.parquet"),
        "data.val_files": str(where.data / "test.parquet"),
        "reward.custom_reward_function.path": str(where.repository / "experiments/verl/reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": study.gpus,
        "trainer.default_local_dir": str(where.checkpoints),
        "trainer.project_name": study.study,
        "trainer.experiment_name": run.id,
    }


def _environment(study: Study, where: Places) -> dict[str, str]:
    cpu = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "qat_core.verl.cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return {
        "VERL_FILE_LOGGER_PATH": str(where.metrics),
        "QAT_CORE_LEDGER": str(where.ledger),
        "PYTHONPATH": str(where.repository),
        "HF_HUB_OFFLINE": "1",  # the model's folder has all
        "VLLM_LOGGING_LEVEL": "INFO",  # verl would hide what the engine says of its memory
        "RAY_USAGE_STATS_ENABLED": "0",
        **(cpu if study.device == "cpu" else {}),
    }


def main() -> None:
    """Prints the command of one run, for the repository's root."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RUN, RESULTS])
    args = parser.parse_args()
    study = load_study(args.study)
    run = study.find_run(args.run)
    if study.trainer != "verl":
        raise ValueError(
            f"{args.study}: trainer: {study.trainer} has no verl command; name a study with "
            "trainer: verl"
        )
    attempt = args.results / run.id / "attempts" / "1"
    print(build_command(study, run, places(study, run, Path(), args.results, attempt)))


if __name__ == "__main__":
    run_cli(main)
