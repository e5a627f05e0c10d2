"""Kinds of input that analyses, the doctor and the checkpoint's command line read."""

import json
import shutil
from pathlib import Path

import yaml

from analysis import overlay
from analysis.claims_table import read_table
from analysis.collapse.judge import judge_study
from analysis.collapse.outcome_table import outcome_table
from analysis.drift.maps import draw
from analysis.tables import benchmark_text
from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.drift import KL, read_drift
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from experiments.support.json_files import write_json, write_jsonl
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.write import convert
from qat_core.doctor.program import read_recipe
from qat_core.doctor.signs import judge
from qat_core.doctor.verl_run import K1, K3, read_run
from qat_core.planning.recipe import Recipe
from tests.malformed.kind import Kind, damage, mutate_bytes, mutate_json, mutate_lines, mutate_yaml
from tests.nano_models import write_nano
from tests.records import become_record
from tests.study_files import changed_study, study_content

RECORDS = ROOT / "experiments" / "records"
STEPS = 12


def _make_verl_run(folder: Path) -> None:
    rows = [
        {"step": step, "data": {K3: 1e-4 * step, K1: 1e-5, "critic/score/mean": 0.5}}
        for step in range(1, STEPS + 1)
    ]
    (folder / "run.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"top_p": 1.0, "top_k": -1, "quantization": None}
    qat = {"enable": True}
    config = {"actor_rollout_ref": {"rollout": rollout, "actor": {"fsdp_config": {"qat": qat}}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "12.jsonl").write_text(2 * (json.dumps({"input": "1+1=", "output": "2"}) + "\n"))


def _read_verl_run(folder: Path) -> None:
    run = read_run(folder)
    judge(run)
    overlay.read_verl(folder)


def _make_drift(folder: Path) -> None:
    row = {"layer": 0, "kind": "q_proj", "name": "q", "relative_error": 0.1, "flipped_codes": 0.2}
    rows = [row | {"step": step, "layer": layer} for step in (1, 2) for layer in (0, 1)]
    rows += [{"step": 2, "layer": 0, "kind": "layer", "kl": 1e-5}]
    (folder / DRIFT_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _read_drift(folder: Path) -> None:
    draw({"run": read_drift(folder)}, ("relative_error", "flipped_codes", KL))


def _make_claims(folder: Path) -> None:
    shutil.copy(RECORDS / "default-long" / "claims.json", folder)


def _read_claims(folder: Path) -> None:
    from rich.console import Console

    table = read_table(folder / "claims.json")
    table.to_markdown()
    table.show(Console(quiet=True), with_details=True)


def _make_benchmarks(folder: Path) -> None:
    shutil.copytree(RECORDS / "benchmarks", folder, dirs_exist_ok=True)


def _read_benchmarks(folder: Path) -> None:
    for kind in ("benchmarks", "repeated_syncs", "goals", "verl", "cost", "codec"):
        benchmark_text(kind, folder, "h200")


def _make_grid(folder: Path) -> None:
    from tests.unit.analysis.synthetic_results import manifest_of, metrics_of

    cells = study_content("collapse")["cells"]
    cells = {name: cells[name] for name in ("dense-lr3e-4", "dense-lr3e-4-tis")}
    changes = {"seeds": [0, 1], "cells": cells, "rl/steps": STEPS, "rl/save_every": STEPS}
    study = changed_study(folder, changes, "collapse")
    for number, run in enumerate(study.runs, start=1):
        run_dir = folder / run.id
        run_dir.mkdir()
        write_json(run_dir / "manifest.json", manifest_of(study, run))
        # cells of an arm would else be copies
        its = {"actor/grad_norm": 1.0, K3: 1e-4 * number}
        rows = [row | its for row in metrics_of(run, STEPS)]
        write_jsonl(run_dir / "metrics.jsonl", rows)
    become_record(folder)


def _read_grid(folder: Path) -> None:
    study = load_study(folder / "study.yaml")
    outcome_table(study, folder)
    judge_study(study, folder)


def _make_packed(folder: Path) -> None:
    write_nano("nano-dense", folder / "bf16", num_layers=1)
    convert(folder / "bf16", folder / "packed", Recipe.full(), "compressed-tensors", True)
    shutil.rmtree(folder / "bf16")


def _read_packed(folder: Path) -> None:
    list(read_checkpoint(folder / "packed"))


def _make_bf16(folder: Path) -> None:
    write_nano("nano-dense", folder / "bf16", num_layers=1)


def _convert(folder: Path) -> None:
    convert(folder / "bf16", folder / "packed", Recipe.full(), "compressed-tensors", True)


def _make_recipe(folder: Path) -> None:
    recipe = {"mode": "w4a16", "scale_policy": "pow2", "ignore": ["re:.*attn.*"]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def _read_recipe(folder: Path) -> None:
    read_recipe(str(folder / "recipe.yaml"), "--recipe")


ANALYSIS_KINDS = {
    "grid: manifest": Kind(_make_grid, damage("manifests.jsonl", mutate_lines), _read_grid),
    "grid: metrics": Kind(_make_grid, damage("metrics.parquet", mutate_bytes), _read_grid),
    "claims": Kind(_make_claims, damage("claims.json", mutate_json), _read_claims),
    "benchmark record": Kind(
        _make_benchmarks, damage("records.jsonl", mutate_lines), _read_benchmarks
    ),
    "drift log": Kind(_make_drift, damage(DRIFT_FILE, mutate_lines), _read_drift),
    "verl run: metrics": Kind(_make_verl_run, damage("*.jsonl", mutate_lines), _read_verl_run),
    "verl run: settings": Kind(_make_verl_run, damage("*.yaml", mutate_bytes), _read_verl_run),
    "packed checkpoint": Kind(_make_packed, damage("packed/*", mutate_bytes), _read_packed),
    "checkpoint to pack": Kind(_make_bf16, damage("bf16/*", mutate_bytes), _convert),
    "doctor's recipe": Kind(_make_recipe, damage("*.yaml", mutate_yaml), _read_recipe),
}
