"""What a run's numbers depend on, as digests: attempts with equal ones are one experiment."""

import json
import os
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from experiments.rl.tasks import make_problems
from experiments.runs.code import digest_code
from experiments.runs.inputs import read_base_manifest, read_data_manifest
from experiments.runs.manifest import Digests
from experiments.runs.provenance import digest_file, digest_json
from experiments.study.schema import ROOT, Run, Study
from experiments.study.yaml_file import read_yaml
from experiments.verl.command import build_command, build_configuration, run_paths
from experiments.verl.verifier import verifier_of

BOOKKEEPING = ("experiments.runs", "experiments.study.schema")  # decides no number
LOCAL_TRAINER = "experiments.launch.local_trainer"
VLLM_PLUGIN = "qat_core.rollout.vllm.plugin"  # its entry point, which every process of vLLM loads
VERL_CONFIG = ROOT / "qat_core" / "verl" / "config"
_read_group = cache(read_yaml)  # the runs of a study name the same few
OWN_NAME = re.compile(r"\b(?:qat_core|experiments)(?:[./]\w+)+")  # of a module, or of its file
# vLLM computes by them, and they may stand in the environment alone
KERNELS = (
    "QAT_CORE_EXACT",
    "QAT_CORE_EXPERTS_KERNEL",
    "QAT_CORE_LINEAR_KERNEL",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_MARLIN_USE_ATOMIC_ADD",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_V2_MODEL_RUNNER",
)
LOCKS = {"eager": ("base.txt", "torch.txt"), "vllm": ("base.txt", "torch.txt", "engines.txt")}


def training_digests(study: Study, run: Run, results: Path) -> Digests:
    """What a run depends on, by kind."""
    base = read_base_manifest(results / "base" / study.base_of(run))
    return {
        "config": config_digest(study, run),
        "code": code_digest(study, run),
        "data": _data_digest(study, results),
        "lock": lock_digest(study),
        # config.json too: random weights do not tell rope_theta or num_experts_per_tok
        "base": digest_json(base.weights | base.files),
    }


def config_digest(study: Study, run: Run) -> str:
    """All settings of a run; with verl also its configuration, wherever its files are."""
    settings = [study.training_config(run), *_verl_settings(study, run)]
    kernels = {name: os.environ[name] for name in KERNELS if name in os.environ}
    if kernels and study.rollout == "vllm":
        settings.append(kernels)
    return digest_json(settings)


def code_digest(study: Study, run: Run) -> str:
    """The code that trains a run."""
    without = (*BOOKKEEPING, *not_executed(study))
    return digest_code(*first_modules(study, run), without=without)


def first_modules(study: Study, run: Run) -> list[str]:
    """The local trainer; with verl, vLLM's plugin and what the run's settings name."""
    if study.trainer == "local":
        return [LOCAL_TRAINER]
    names = OWN_NAME.findall(json.dumps(_verl_settings(study, run)))
    return sorted({VLLM_PLUGIN, *(name.replace("/", ".") for name in names)})


def _verl_settings(study: Study, run: Run) -> list[Any]:
    """Command, configuration and this project's groups of a verl run, without the study's name."""
    if study.trainer == "local":
        return []
    study = study.model_copy(update={"study": "study"})
    paths = run_paths(study, run, Path(), Path(), Path())
    configuration = build_configuration(study, run, paths)
    groups = [it for it in configuration["defaults"] if isinstance(it, dict)]
    files = [VERL_CONFIG / name / f"{choice}.yaml" for it in groups for name, choice in it.items()]
    return [build_command(study, run, paths), configuration, *map(_read_group, files)]


def not_executed(study: Study) -> tuple[str, ...]:
    """What programs import or name, but not for this study: engines, their kernels, watching.

    All of it is imported where it is used, never at the top of a module that is executed anyway.
    """
    on_gpu, has_vllm = study.device == "cuda", study.rollout == "vllm"
    asked = {os.environ.get(name) for name in KERNELS}
    is_exact = any(map(study.is_exact, study.arms)) or os.environ.get("QAT_CORE_EXACT") == "1"
    is_watched = study.rl.drift_every > 0
    executed = {
        "experiments.rl.drift_log": is_watched,
        "qat_core.drift": is_watched,
        "qat_core.nvfp4.launch": on_gpu,
        "qat_core.exact": has_vllm,
        "qat_core.exact.kernels": is_exact,
        "qat_core.rollout.vllm": has_vllm,
        "qat_core.rollout.vllm.cpu": not on_gpu,
        "qat_core.rollout.vllm.exact": is_exact,
        "qat_core.rollout.vllm.first_difference": is_exact,
        "qat_core.rollout.vllm.humming": is_exact or "humming" in asked,
        "qat_core.rollout.vllm.marlin.unpacking": "marlin-unpack" in asked,
        "qat_core.rollout.vllm.tile_layout_kernels": on_gpu,
        "qat_core.verl.cpu_engine": not on_gpu,
        "qat_core.verl.cpu_transport": not on_gpu,
        "qat_core.verl.exact": is_exact,
        "qat_core.verl.exact_count": is_exact,
    }
    return tuple(part for part, is_executed in executed.items() if not is_executed)


def lock_digest(study: Study) -> str:
    """The packages that train the runs of a study; of a verifier, those that are installed."""
    digests: list[object] = [digest_file(ROOT / "requirements" / f) for f in LOCKS[study.rollout]]
    if verifier := verifier_of(study.task.name):
        digests.append(verifier)
    return digest_json(digests)


def _data_digest(study: Study, results: Path) -> str:
    if study.trainer == "verl":
        data = read_data_manifest(results / "data" / study.study)
        return digest_json({"train": data.train.sha256, "test": data.test.sha256})
    problems = (make_problems(study.task, "train"), make_problems(study.task, "test"))
    return digest_json([[asdict(problem) for problem in split] for split in problems])
