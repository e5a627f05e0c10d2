"""`python -m experiments.verl.command`: how verl trains a run of a study.

A configuration file with all settings, and a short command that names it: functions of the study,
its recipe and the paths of the run's files. The file is a primary configuration of Hydra's: verl's
own, then this project's groups (`nvfp4`, `attention`, `platform`), then the settings.
"""

import argparse
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from experiments.rl.config import GrpoConfig
from experiments.study.arms import make_recipes
from experiments.study.load import load_study
from experiments.study.schema import Run, Study
from experiments.study.verl_settings import Setting
from experiments.support.cli import RESULTS, RUN, STUDY, run_cli
from experiments.verl.recipe_rules import require_study_as_it_is

FROM_STUDY = "the study"
# verl's names; its plain rewards are a module of ours
ADVANTAGES = {"group": "grpo", "reward": "reward"}
REWARD_MODULE = "qat_core.verl.advantage"
CORRECTIONS = {"token_tis": "token", "none": None}
CONFIGURATION = "verl.yaml"
MOST_ENGINES = 1024
QAT = "actor_rollout_ref.actor.fsdp_config.qat"
# its default for what stays in BF16, which a list of ours takes the place of
VERLS_PATTERNS = ("lm_head", "embed_tokens", "re:.*mlp.gate$")


class _Dumper(yaml.SafeDumper):
    """Quotes also the strings that only Hydra takes for numbers, such as 1e-6."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[\d_]*\.?[\d_]+[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


class RunPaths(NamedTuple):
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
    def coverage(self) -> Path:
        """Which weights are trained, packed and served in which precision."""
        return self.attempt / "coverage.json"


class Command(NamedTuple):
    """Arguments, and what the environment holds besides."""

    arguments: list[str]
    environment: dict[str, str]

    def __str__(self) -> str:
        """A line of shell, broken after each part."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        parts = [*variables, shlex.join(self.arguments)]
        return " \\\n  ".join(parts)


def run_paths(study: Study, run: Run, repository: Path, results: Path, attempt: Path) -> RunPaths:
    """Where a run of a study reads and writes."""
    return RunPaths(
        repository=repository,
        model=results / "base" / study.base_of(run),
        data=results / "data" / study.study,
        checkpoints=results / run.id / "checkpoints",
        attempt=attempt,
    )


def build_command(study: Study, run: Run, paths: RunPaths) -> Command:
    """How verl is called, for a run whose configuration lies in its attempt's folder."""
    program = ["python", "-m", "verl.trainer.main_ppo"]
    file = Path(CONFIGURATION)
    arguments = ["--config-dir", str(paths.attempt), "--config-name", file.stem]
    return Command([*program, *arguments], _environment(study, run, paths))


def build_configuration(study: Study, run: Run, paths: RunPaths) -> dict[str, Any]:
    """What `verl.yaml` holds for a run."""
    settings = {key: setting.value for key, setting in run_settings(study, run, paths).items()}
    groups = [
        {key.removeprefix("+"): settings.pop(key)} for key in sorted(settings) if is_group(key)
    ]
    hydra = {"run": {"dir": str(paths.attempt / "hydra")}}
    return {"defaults": ["ppo_trainer", *groups, "_self_"], "hydra": hydra, **to_tree(settings)}


def to_tree(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections of dotted keys, in the order of their names, without the "+" of new keys."""
    tree: dict[str, Any] = {}
    for key in sorted(settings, key=lambda key: key.replace("+", "")):
        *sections, name = key.replace("+", "").split(".")
        section = tree
        for parent in sections:
            section = section.setdefault(parent, {})
        section[name] = settings[key]
    return tree


def is_group(key: str) -> bool:
    """Whether a key chooses one of this project's files for verl, as `+nvfp4: w4a16` does."""
    return key.startswith("+") and "." not in key


def to_yaml(configuration: dict[str, Any]) -> str:
    """The text of `verl.yaml`."""
    return yaml.dump(configuration, Dumper=_Dumper, sort_keys=False, width=100)


def run_settings(study: Study, run: Run, paths: RunPaths) -> dict[str, Setting]:
    """All that a run sets in verl, by key."""
    recipe = study.recipe_of(run)
    own = _training(study.rl_of(run.cell)) | _seeds(run.seed) | _precision(study, run)
    own |= _files(study, run, paths)
    settings = {key: Setting(value, FROM_STUDY) for key, value in own.items()}
    require_study_as_it_is(study, recipe, settings)
    return recipe | settings


def _training(rl: GrpoConfig) -> dict[str, Any]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens = rl.rollout.max_prompt_tokens + rl.rollout.max_response_tokens
    return {
        "trainer.total_training_steps": rl.steps,
        # verl saves after the last step too, unless it never does
        "trainer.save_freq": rl.save_every if rl.save_every <= rl.steps else -1,
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
        "algorithm.adv_estimator": ADVANTAGES[rl.advantage],
        "algorithm.rollout_correction.rollout_is": CORRECTIONS[rl.correction],
        "algorithm.rollout_correction.rollout_is_threshold": rl.rollout_is_threshold,
    }


def _seeds(seed: int) -> dict[str, Any]:
    return {
        "data.seed": seed,
        # verl adds an engine's number: engines of neighbouring seeds would sample alike
        "actor_rollout_ref.rollout.seed": seed * MOST_ENGINES % 2**32,
        "actor_rollout_ref.actor.data_loader_seed": seed,
        "actor_rollout_ref.actor.fsdp_config.seed": seed,
    }


def _precision(study: Study, run: Run) -> dict[str, Any]:
    recipes = make_recipes(run.arm, study.scale_policy, study.block_scale_method)
    settings: dict[str, Any] = {"+exact": "on"} if study.is_exact(run.arm) else {}
    if recipes.rollout is None:
        return settings | {"+nvfp4": "off"}
    settings |= {
        "+nvfp4": "w4a16",
        f"{QAT}.scale_policy": study.scale_policy,
        f"{QAT}.block_scale_method": study.block_scale_method,
    }
    if recipes.train is None:
        settings[f"{QAT}.train"] = False
    if recipes.rollout.ignore:
        settings[f"{QAT}.ignore_patterns"] = [*VERLS_PATTERNS, *recipes.rollout.ignore]
    return settings


def _files(study: Study, run: Run, paths: RunPaths) -> dict[str, Any]:
    return {
        **({"+platform": "cpu"} if study.device == "cpu" else {}),
        "actor_rollout_ref.model.path": str(paths.model),
        "data.train_files": str(paths.data / "train.parquet"),
        "data.val_files": str(paths.data / "test.parquet"),
        "reward.custom_reward_function.path": str(paths.repository / "experiments/verl/reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": study.gpus,
        "trainer.nnodes": 1,  # the launcher starts a Ray of this machine alone
        "trainer.default_local_dir": str(paths.checkpoints),
        "trainer.project_name": study.study,
        "trainer.experiment_name": run.id,
    }


def _environment(study: Study, run: Run, paths: RunPaths) -> dict[str, str]:
    is_cpu = study.device == "cpu"
    cpu = {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    is_reward = study.rl_of(run.cell).advantage == "reward"
    modules = ["qat_core.verl.cpu"] * is_cpu + [REWARD_MODULE] * is_reward
    return {
        "VERL_FILE_LOGGER_PATH": str(paths.metrics),
        "QAT_CORE_COVERAGE": str(paths.coverage),
        "PYTHONPATH": str(paths.repository),
        "HF_HUB_OFFLINE": "1",  # the model's folder has all
        "VLLM_LOGGING_LEVEL": "INFO",  # verl would hide what the engine says of its memory
        "RAY_USAGE_STATS_ENABLED": "0",
        **(cpu if is_cpu else {}),
        **({"VERL_USE_EXTERNAL_MODULES": ",".join(modules)} if modules else {}),
    }


def main() -> None:
    """Prints configuration and command of one run, for the repository's root."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY, RUN, RESULTS])
    parser.add_argument(
        "--write", action="store_true", help=f"write {CONFIGURATION}, print only the command"
    )
    args = parser.parse_args()
    study = load_study(args.study)
    run = study.find_run(args.run)
    if study.trainer != "verl":
        raise ValueError(
            f"{args.study}: trainer: {study.trainer} has no verl command; name a study with "
            "trainer: verl"
        )
    attempt = args.results / run.id / "attempts" / "1"
    paths = run_paths(study, run, Path(), args.results, attempt)
    text = to_yaml(build_configuration(study, run, paths))
    if args.write:
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / CONFIGURATION).write_text(text)
    else:
        print(f"# {attempt / CONFIGURATION}\n{text}")
    print(build_command(study, run, paths))


if __name__ == "__main__":
    run_cli(main)
