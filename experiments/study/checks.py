"""Checks across the sections of a study: what one section alone cannot tell."""

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import chain
from pathlib import Path

from pydantic import ValidationError

from experiments.rl.config import GrpoConfig, TaskConfig
from experiments.rl.tasks import GENERATED_TASKS
from experiments.study.model_config import read_model_config
from experiments.study.models import GgufModel, HubModel
from experiments.study.recipe_checks import (
    check_checkpoints,
    check_gpu_shares,
    check_scores,
    check_shared_gpus,
)
from experiments.study.schema import ROOT, Study
from experiments.study.verl_settings import known_recipes, known_variants
from experiments.study.yaml_file import suggest

VERL_CORRECTIONS = ("token_tis", "none")


def failed_checks(study: Study) -> Iterator[str]:
    """Each as "<dotted key>: <what>; <hint>"; later checks assume that earlier ones passed."""
    of_trainer = _check_verl if study.trainer == "verl" else _check_local
    return chain(
        _check_lists(study),
        _check_cells(study),
        _check_judge(study),
        _check_files(study),
        of_trainer(study),
        _check_task(study),
        _check_mini_batches(study),
        _check_exact(study),
        check_shared_gpus(study),
    )


def _check_lists(study: Study) -> Iterator[str]:
    lists: dict[str, tuple[Hashable, ...]] = {
        "models": tuple(study.models),
        "arms": study.arms,
        "seeds": study.seeds,
    }
    for key, values in lists.items():
        if not values:
            yield f"{key}: empty; name at least one"
        for value, count in Counter(values).items():
            if count > 1:
                yield f"{key}: {value} is listed twice; remove one"


def _check_cells(study: Study) -> Iterator[str]:
    for name, cell in study.cells.items():
        for key, wanted, known in (
            ("models", cell.models, tuple(study.models)),
            ("arms", cell.arms, study.arms),
        ):
            for value in set(wanted or ()) - set(known):
                yield f"cells.{name}.{key}: {value} is not in the study; it has {', '.join(known)}"
        try:
            study.rl_of(name)
        except ValidationError as error:
            details = error.errors()[0]
            reason = details.get("ctx", {}).get("error", details["msg"])
            where = ".".join(("cells", name, *map(str, details["loc"])))
            yield f"{where}: {reason}"


def _check_judge(study: Study) -> Iterator[str]:
    if study.judged_by == "collapse" and "claims" in study.model_fields_set:
        yield "claims: only judged_by: parity reads it; remove it"
    if study.judged_by == "parity" and "primary" in study.model_fields_set:
        yield "primary: only judged_by: collapse reads it; remove it"


def _check_files(study: Study) -> Iterator[str]:
    if study.protocol is not None and not (ROOT / study.protocol).is_file():
        yield f"protocol: no file {study.protocol}; paths are relative to the repository root"
    for name, model in study.models.items():
        if not isinstance(model, GgufModel) and not (ROOT / model.config).is_file():
            yield (
                f"models.{name}.config: no file {model.config}; paths are relative to the "
                "repository root"
            )


def _check_mini_batches(study: Study) -> Iterator[str]:
    rl = study.rl
    if rl.prompts_per_step % rl.mini_batch_prompts:
        yield (
            f"rl.mini_batch_prompts: {rl.mini_batch_prompts} does not divide "
            f"rl.prompts_per_step, {rl.prompts_per_step}; use one of its divisors"
        )


def _check_local(study: Study) -> Iterator[str]:
    if study.task.name not in GENERATED_TASKS:
        yield f"task.name: only trainer: verl reads the files of {study.task.name}; use verl"
    for name, model in study.models.items():
        if isinstance(model, HubModel):
            yield (
                f"models.{name}.kind: the local trainer loads no hub checkpoint; use "
                "trainer: verl, or kind: scratch or gguf"
            )
        if model.recipe is not None:
            yield f"models.{name}.recipe: only trainer: verl reads it; remove it"
    for key in ("gpus", "variant", "kl_gate"):
        if key in study.model_fields_set:
            yield f"{key}: only trainer: verl reads it; remove it"
    if study.rollout != "eager" and any(rl.keeps_distributions for rl in _all_rl(study).values()):
        yield (
            f"rollout: {study.rollout} returns no whole distributions, which "
            "rl.measure_drift_term and rl.correction: score_centering need; use eager"
        )
    yield from _check_routing_replay(study)


def _check_exact(study: Study) -> Iterator[str]:
    """What of a study was not proven to be exact; the model is asked when a run starts."""
    if not any(map(study.is_exact, study.arms)):
        return
    for key, value, needed in (
        ("device", study.device, "cuda"),
        ("rollout", study.rollout, "vllm"),
        ("scale_policy", study.scale_policy, "pow2"),
    ):
        if value != needed:
            yield f"{key}: {value}: exact arms were proven with {needed} only; use {needed}"
    for where, rl in _all_rl(study).items():
        for key, found, exact in (
            ("rollout.temperature", rl.rollout.temperature, 1),
            ("rollout.top_p", rl.rollout.top_p, 1),
            ("rollout.top_k", rl.rollout.top_k, -1),
            ("routing_replay", rl.routing_replay, False),
        ):
            if found != exact:
                yield f"{where}.{key}: {found}: exact arms were proven with {exact} only"


def _check_routing_replay(study: Study) -> Iterator[str]:
    """A dense model has no routes."""
    replaying = (run.model for run in study.runs if study.rl_of(run.cell).routing_replay)
    for name in dict.fromkeys(replaying):
        model = study.models[name]
        if isinstance(model, GgufModel) or not _has_experts(model.config):
            yield (
                f"rl.routing_replay: {name} has no experts; remove the key, or set it in cells of "
                "other models"
            )


def _has_experts(config: Path) -> bool:
    content = read_model_config(ROOT / config, "correct it, or name another file")
    return content.get("num_experts_per_tok") is not None


def _all_rl(study: Study) -> dict[str, GrpoConfig]:
    """What `rl` says, by where: in each cell, if the study has some."""
    return {f"cells.{name}": study.rl_of(name) for name in study.cells} or {"rl": study.rl}


def _check_verl(study: Study) -> Iterator[str]:
    if study.rollout != "vllm":
        yield f"rollout: verl rolls out with vllm, not {study.rollout}; use vllm"
    yield from _check_of_local_alone(study)
    for name, model in study.models.items():
        yield from _check_known(f"models.{name}.recipe", model.recipe, known_recipes())
    for variant in study.variant:
        yield from _check_known("variant", variant, known_variants())
    if study.rl.drift_every:
        yield "rl.drift_every: only trainer: local watches the drift of weights; remove it"
    gate = study.kl_gate
    if gate is not None and gate.steps < study.rl.save_every:
        yield (
            f"kl_gate.steps: {gate.steps} may end a run before its first checkpoint, which is "
            f"evaluated; use rl.save_every, {study.rl.save_every}, or more"
        )
    yield from check_gpu_shares(study)
    yield from check_checkpoints(study)
    yield from check_scores(study)


def _check_of_local_alone(study: Study) -> Iterator[str]:
    """Settings that verl's trainer does not honour."""
    default = GrpoConfig(steps=1)
    for where, rl in _all_rl(study).items():
        for key in ("rollout_rs_band", "routing_replay", "measure_drift_term"):
            if getattr(rl, key) != getattr(default, key):
                yield f"{where}.{key}: only trainer: local knows {getattr(rl, key)}; remove it"
        if rl.correction not in VERL_CORRECTIONS:
            yield (
                f"{where}.correction: only trainer: local knows {rl.correction}; use one of "
                f"{', '.join(VERL_CORRECTIONS)}"
            )


def _check_task(study: Study) -> Iterator[str]:
    """Whether the task has as many problems as are asked for."""
    task, per_step, evaluated = study.task, study.rl.prompts_per_step, study.evaluation.prompts
    if task.name not in GENERATED_TASKS:
        for name, model in study.models.items():
            if not isinstance(model, HubModel) and model.pretrain is not None:
                yield f"models.{name}.pretrain: {task.name} has no worked answers; remove it"
        return  # how many problems its files hold is known once they are there
    if per_step > task.train_prompts:
        yield (
            f"rl.prompts_per_step: {per_step} is more than task.train_prompts, "
            f"{task.train_prompts}; lower it or raise train_prompts"
        )
    needed = task.train_prompts + task.test_prompts
    if _count_problems(task) < needed:
        yield (
            f"task: terms {list(task.terms)} and largest {task.largest} give only "
            f"{_count_problems(task)} different problems, not {needed}; widen them or lower "
            "train_prompts"
        )
    if evaluated > task.test_prompts:
        yield (
            f"evaluation.prompts: {evaluated} is more than task.test_prompts, {task.test_prompts}; "
            "lower it or raise test_prompts"
        )


def _count_problems(task: TaskConfig) -> int:
    """Each term takes the sum, between 0 and `largest`, to any other; there are 36 wordings."""
    fewest, most = task.terms
    chains: int = sum(task.largest**terms for terms in range(fewest, most + 1))
    return chains * (36 if task.name == "word-problem" else 1)


def _check_known(key: str, name: str | None, known: list[str]) -> Iterator[str]:
    if name not in known:
        hint = suggest(name or "", known, f"use one of {', '.join(known)}")
        yield f"{key}: {f'no recipe {name}' if name else 'missing'}; {hint}"
