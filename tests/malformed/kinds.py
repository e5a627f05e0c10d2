"""All kinds of input, each with a valid original, a way to damage it, and its reader."""

import json
import shutil
from pathlib import Path

import torch
import yaml

from analysis.load import load_results
from analysis.parity.judge import judge_study
from experiments.base.make import build_model, read_config
from experiments.launch.run import open_attempts
from experiments.rl import resume
from experiments.rl.optimizer import MasterAdamW
from experiments.rl.tokenizer import character_tokenizer
from experiments.runs.attempts import next_attempt, read_history, write_results
from experiments.runs.inputs import check_base
from experiments.runs.provenance import digest_file
from experiments.study.load import load_study
from experiments.study.model_config import read_model_config
from experiments.study.preview import preview
from experiments.study.schema import ROOT
from experiments.support.json_files import write_json, write_jsonl
from qat_core.planning.predicted_memory import predict_weight_memory_gib
from tests.malformed.analysis_kinds import ANALYSIS_KINDS
from tests.malformed.kind import Kind, damage, mutate_bytes, mutate_json, mutate_lines, mutate_yaml
from tests.nano_models import write_nano
from tests.records import become_record, make_manifest
from tests.study_files import REMOVED, changed_study, study_content

STUDY_FILES = ("default", "verl_nano", "collapse")
PROMPTS, STEPS = 8, 12
DIGESTS = {"config": "c"}


def _make_study(folder: Path) -> None:
    for name in STUDY_FILES:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(study_content(name)))


def _read_studies(folder: Path) -> None:
    for name in STUDY_FILES:
        preview(load_study(folder / f"{name}.yaml"))


def _make_model_config(folder: Path) -> None:
    for name in ("nano-dense", "nano-moe"):
        shutil.copy(ROOT / "experiments" / "models" / f"{name}.json", folder)


def _read_model_configs(folder: Path) -> None:
    for name in ("nano-dense", "nano-moe"):
        path = folder / f"{name}.json"
        config = read_model_config(path, "correct it")
        try:
            predict_weight_memory_gib(config, "full")
        except ValueError as error:  # `preview` names the file
            raise ValueError(f"{path}: {error}") from None
        if sum(config[key] for key in ("hidden_size", "vocab_size")) < 10_000:
            with torch.device("meta"):
                build_model(path, read_config(path))


def _make_results(folder: Path) -> None:
    from tests.unit.analysis.synthetic_results import evaluations_of, manifest_of, metrics_of

    changes = {"seeds": [0], "arms": ["bf16", "nvfp4-qat"], "models/nano-moe": REMOVED}
    study = changed_study(folder, changes | {"rl/steps": STEPS, "evaluation/prompts": PROMPTS})
    for run in study.runs:
        run_dir = folder / run.id
        run_dir.mkdir()
        write_json(run_dir / "manifest.json", manifest_of(study, run))
        write_json(run_dir / "eval.json", evaluations_of(study, run))
        write_jsonl(run_dir / "metrics.jsonl", metrics_of(run, STEPS))


def _make_record(folder: Path) -> None:
    _make_results(folder)
    become_record(folder)


def _read_record(folder: Path) -> None:
    study = load_study(folder / "study.yaml")
    judge_study(study, load_results(study, folder))


def _make_attempts(folder: Path) -> None:
    for status, steps in (("failed", (1, 2, 3)), ("finished", (3, 4))):
        attempt = next_attempt(folder)
        make_manifest(status=status, digests=DIGESTS, attempt=attempt.number).write(attempt.folder)
        for step in steps:
            attempt.append({"step": step, "timing_s/step": 1.0, "x": None})


def _read_attempts(folder: Path) -> None:
    read_history(folder)
    write_results(folder)
    open_attempts(folder, DIGESTS)


class _Tiny:
    """The weights of a checkpoint that every case restores again."""

    parameters: list[torch.nn.Parameter]

    @classmethod
    def optimizer(cls) -> MasterAdamW:
        return MasterAdamW(cls.parameters, lr=1e-3, weight_decay=0.0)


def _make_checkpoint(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_nano("nano-dense", folder / "model", num_layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    shutil.rmtree(folder / "model")
    _Tiny.parameters = list(model.parameters())
    resume.save(folder, 2, model, character_tokenizer(), _Tiny.optimizer())


def _read_checkpoint(folder: Path) -> None:
    resume.load(folder, _Tiny.optimizer())


def _make_base(folder: Path) -> None:
    write_nano("nano-dense", folder / "model", num_layers=1)
    for path in list((folder / "model").iterdir()):
        path.rename(folder / path.name)
    (folder / "model").rmdir()
    files = {path.name: digest_file(path) for path in sorted(folder.iterdir())}
    weights = {"model.safetensors": files.pop("model.safetensors")}
    manifest = {"weights": weights, "files": files, "weight_bytes": 1}
    (folder / "manifest.json").write_text(json.dumps(manifest))


KINDS = {
    "study: a value or key": Kind(_make_study, damage("*.yaml", mutate_yaml), _read_studies),
    "study: the text": Kind(_make_study, damage("*.yaml", mutate_bytes), _read_studies),
    "model configuration": Kind(
        _make_model_config, damage("*.json", mutate_json), _read_model_configs
    ),
    "base checkpoint": Kind(_make_base, damage("*", mutate_bytes), check_base),
    "checkpoint to resume": Kind(
        _make_checkpoint, damage("step_2/*", mutate_bytes), _read_checkpoint
    ),
    "attempts: manifest": Kind(
        _make_attempts, damage("attempts/*/manifest.json", mutate_json), _read_attempts
    ),
    "attempts: metrics": Kind(
        _make_attempts, damage("attempts/*/metrics.jsonl", mutate_bytes), _read_attempts
    ),
    "record: manifest": Kind(_make_record, damage("manifests.jsonl", mutate_lines), _read_record),
    "evaluations": Kind(_make_results, damage("*/eval.json", mutate_json), _read_record),
    "record: evaluations": Kind(
        _make_record, damage("evaluations.parquet", mutate_bytes), _read_record
    ),
    "record: metrics": Kind(_make_record, damage("metrics.parquet", mutate_bytes), _read_record),
    **ANALYSIS_KINDS,
}
