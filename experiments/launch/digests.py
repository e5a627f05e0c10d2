"""What a run's numbers depend on, as digests: attempts with equal ones are one experiment."""

import os
from dataclasses import asdict
from pathlib import Path

from experiments.runs.base_manifest import read_base_manifest
from experiments.runs.data_manifest import read_data_manifest
from experiments.runs.manifest import Digests
from experiments.runs.provenance import digest_code, digest_file, digest_json, digest_module
from experiments.study.schema import ROOT, Run, Study
from experiments.verl.command import build_command, build_configuration, run_paths
from experiments.verl.verifier import verifier_of
from qat_core.rl.tasks import make_problems

# what decides a run's numbers; how they are recorded and tracked does not
TRAINING_CODE = {
    "local": ("experiments.study.arms", "qat_core.bf16_on_cpu", "qat_core.rl.trainer"),
    "verl": (
        "experiments.verl.reward",
        "qat_core.verl.advantage",
        "qat_core.verl.cpu",
        "qat_core.verl.engine",
        "qat_core.verl.log_probs",
        "qat_core.verl.sampler",
        "qat_core.verl.worker",
        "qat_core.rollout.vllm.plugin",
        "experiments.benchmarks.seeded_engine",
    ),
}
# makes the local trainer's configuration; what else it imports is bookkeeping
LOCAL_TRAINER = "experiments.launch.local_trainer"
VERL_CONFIG = ROOT / "qat_core" / "verl" / "config"
# vLLM computes by them, and they may stand in the environment alone
KERNELS = (
    "QAT_CORE_EXPERTS_KERNEL",
    "QAT_CORE_LINEAR_KERNEL",
    "VLLM_BATCH_INVARIANT",
    "VLLM_MARLIN_USE_ATOMIC_ADD",
)
LOCKS = {"eager": ("base.txt", "torch.txt"), "vllm": ("base.txt", "torch.txt", "engines.txt")}


def training_digests(study: Study, run: Run, results: Path) -> Digests:
    """What a run depends on, by kind.

    Raises:
        ValueError: the base checkpoint or the data is missing.
    """
    base = read_base_manifest(results / "base" / study.base_of(run))
    return {
        "config": config_digest(study, run),
        "code": code_digest(study),
        "data": _data_digest(study, results),
        "lock": lock_digest(study),
        # config.json too: random weights do not tell rope_theta or num_experts_per_tok
        "base": digest_json(base.weights | base.files),
    }


def config_digest(study: Study, run: Run) -> str:
    """All settings of a run; with verl also its configuration, wherever its files are."""
    settings: list[object] = [study.training_config(run)]
    if study.trainer == "verl":
        paths = run_paths(study, run, Path(), Path(), Path())
        settings += [build_command(study, run, paths), build_configuration(study, run, paths)]
    kernels = {name: os.environ[name] for name in KERNELS if name in os.environ}
    if kernels and study.rollout == "vllm":
        settings.append(kernels)
    return digest_json(settings)


def code_digest(study: Study) -> str:
    """The code that trains the runs of a study."""
    digests = [digest_code(*TRAINING_CODE[study.trainer])]
    if study.trainer == "verl":
        digests += [digest_file(path) for path in sorted(VERL_CONFIG.glob("*/*.yaml"))]
    else:
        digests.append(digest_module(LOCAL_TRAINER))
    return digest_json(digests)


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
