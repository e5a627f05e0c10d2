"""What a run's numbers depend on, as digests: attempts with equal ones are one experiment."""

from dataclasses import asdict
from pathlib import Path

from experiments.runs.provenance import digest_code, digest_file, digest_json
from experiments.study.schema import ROOT, Run, Study
from experiments.support.json_files import Json, read_json
from experiments.verl.command import build_command, places
from qat_core.rl.tasks import make_problems

# what decides a run's numbers; how they are written down and tracked does not
TRAINING_CODE = {
    "local": ("experiments.study.arm_recipes", "qat_core.rl.trainer"),
    "verl": (
        "experiments.verl.reward",
        "qat_core.verl.cpu",
        "qat_core.verl.engine",
        "qat_core.verl.worker",
        "qat_core.rollout.vllm.plugin",
    ),
}
VERL_CONFIG = ROOT / "qat_core" / "verl" / "config"
LOCKS = {"eager": ("base.txt",), "vllm": ("base.txt", "engines.txt")}


def training_digests(study: Study, run: Run, results: Path) -> Json:
    """What a run depends on, by kind.

    Raises:
        ValueError: the base checkpoint or the data is missing.
    """
    return {
        "config": config_digest(study, run),
        "code": code_digest(study),
        "data": _data_digest(study, results),
        "lock": digest_json([digest_file(ROOT / "requirements" / f) for f in LOCKS[study.rollout]]),
        "base": digest_json(_base_weights(results / "base" / run.model)),
    }


def config_digest(study: Study, run: Run) -> str:
    """All settings of a run; with verl, of the very command line, wherever its files lie."""
    settings: list[object] = [study.training_config(run)]
    if study.trainer == "verl":
        settings.append(build_command(study, run, places(study, run, Path(), Path(), Path())))
    return digest_json(settings)


def code_digest(study: Study) -> str:
    """The code that trains the runs of a study."""
    digests = [digest_code(*TRAINING_CODE[study.trainer])]
    if study.trainer == "verl":
        digests += [digest_file(path) for path in sorted(VERL_CONFIG.glob("*/*.yaml"))]
    return digest_json(digests)


def _base_weights(base_dir: Path) -> Json:
    manifest = base_dir / "manifest.json"
    if not manifest.is_file():
        raise ValueError(f"{manifest}: no base checkpoint; make it with `snakemake {manifest}`")
    weights: Json = read_json(manifest)["weights"]
    return weights


def _data_digest(study: Study, results: Path) -> str:
    if study.trainer == "verl":
        described = results / "data" / study.study / "data.json"
        if not described.is_file():
            raise ValueError(f"{described}: no data; make it with `snakemake {described}`")
        return digest_json({split: part["sha256"] for split, part in read_json(described).items()})
    splits = (make_problems(study.task, "train"), make_problems(study.task, "test"))
    return digest_json([[asdict(problem) for problem in split] for split in splits])
