"""Benchmarks: options refused, what counts as equal, what is recorded, small ones on a CPU."""

import argparse
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from analysis.tables.rows import rows_sections
from experiments.benchmarks import engines, parameter, zero_mismatch
from experiments.benchmarks.__main__ import main
from experiments.benchmarks.architectures import DENSE
from experiments.benchmarks.engine_tables import TABLES, rows_of
from experiments.benchmarks.exact_cases import Case
from experiments.benchmarks.main_job import stages
from experiments.benchmarks.qat_layers import QAT_ARMS, apply_arm, layer_stack, step_inputs
from experiments.benchmarks.records import ENGINE_PACKAGES, shape_of
from experiments.benchmarks.verl_steps import COLUMNS, IN_PLACE, MEMORY, shown, write_record
from experiments.rl.metric_names import STEP_TIME
from experiments.runs.attempts import next_attempt
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES
from experiments.support.cli import run_cli
from experiments.support.json_files import read_json, write_json
from qat_core.rollout.engine import Rollouts
from qat_core.training.preparation import state_of
from tests.files import edit_json
from tests.integration.vllm_versions import RECORD, outcomes, table
from tests.records import make_manifest
from tests.workflow.programs import module

STUDY = load_study(STUDIES / "qwen3_moe_replay.yaml")
BF16, QAT = STUDY.runs
WALL_S = 100.0


def write_run(results: Path, arm: int, steps: int, **memory: list[float | None]) -> Path:
    """A run whose first step took 50 s and the others 10, 20 and so on."""
    run = STUDY.runs[arm]
    attempt = next_attempt(results / run.id)
    for step in range(steps):
        columns = dict.fromkeys(COLUMNS.values(), 1.0)
        peaks = {MEMORY[name]: values[step] for name, values in memory.items()}
        attempt.append({"step": step + 1, STEP_TIME: 10.0 * step or 50.0} | columns | peaks)
    make_manifest(
        **{"run": run.id, "model": run.model, "arm": run.arm, "wall_s": WALL_S},
        config=STUDY.training_config(run),
    ).write(attempt.folder)
    return results / run.id


def test_a_record_has_every_run_with_a_second_step(tmp_path: Path) -> None:
    peaks = {"actor_peak_gib": [3.0, 5.0, None], "host_peak_gib": [None, None, None]}
    folders = [write_run(tmp_path, 0, 1), write_run(tmp_path, 1, 3, **peaks)]
    write_record(tmp_path / "record.json", folders)
    (found,) = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert (found["arm"], found["steps"], found["mean_of_bf16"]) == ("nvfp4-qat", 3, None)
    assert found["step_s"] == [10.0, 15.0, 20.0]
    assert found["outside_steps_s"] == WALL_S - 80.0
    assert (found["memory.actor_peak_gib"], found["memory.host_peak_gib"]) == (5.0, None)


@pytest.mark.parametrize(
    ("arm", "environment", "setting"),
    [
        ("qat", {}, "qat"),
        ("qat", {IN_PLACE: "0"}, "qat, reload"),
        ("qat", {"QAT_CORE_EXPERTS_KERNEL": "humming"}, "qat, experts by humming"),
        ("bf16", {IN_PLACE: "0"}, "bf16"),
    ],
)
def test_a_run_is_named_by_what_served_it_and_compared_with_bf16_of_its_code(
    arm: str, environment: dict[str, str], setting: str
) -> None:
    def run(arm: str, k3: float, commit: str = "0123456789") -> dict[str, Any]:
        found = {"model": "m", "arm": arm, "gpus": 1, "steps": 4, "planned_steps": 20}
        found |= {"git": {"commit": commit}, "environment": environment}
        return found | {"memory": {}, "mean_k3_kl": k3, "k3_kl": [0.0, 2 * k3, 9.0]}

    own = run(arm, 6e-5)
    row = shown(own, [run("bf16", 1e-2, "abcdef012"), run("bf16", 2e-5), own])
    assert (row["setting"], row["progress"], row["commit"]) == (setting, "4 of 20", "0123456")
    assert row["mean_of_bf16"] == row["median_of_bf16"] == pytest.approx(3.0)


def test_without_a_second_step_there_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run has a second step"):
        write_record(tmp_path / "record.json", [write_run(tmp_path, 0, 1)])


def test_runs_of_the_local_trainer_are_refused(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, 1, 3)
    path = run_dir / "attempts" / "1" / "manifest.json"
    edit_json(path, lambda manifest: manifest["config"].update(trainer="local"))
    with pytest.raises(ValueError, match=f"{run_dir}: not a run of verl, its trainer is local; na"):
        write_record(tmp_path / "record.json", [run_dir])


SETUP = {"hardware": {"gpus": ["GPU X"]}, "git": {"commit": "abc"}}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(engines, "origin", lambda *_, **__: SETUP)
    monkeypatch.setattr(engines, "vllm_version", lambda: "0.24.0")
    monkeypatch.setattr(engines, "call_in_subprocess", lambda measure, *named: measure(*named))
    kernels = {"bf16": {}, "nvfp4": {"KERNELS_OF_THIS_TEST": "marlin"}}
    monkeypatch.setattr(engines, "PRECISIONS", kernels)
    monkeypatch.setenv("KERNELS_OF_THIS_TEST", "none")
    shape = shape_of({"share": 0.9}, *TABLES["serving"], ENGINE_PACKAGES)
    rows = rows_of("serving", {"m:bf16": {"old": True}})
    kept = {"benchmark": "serving", **SETUP, **shape, "rows": rows}
    (tmp_path / "record.json").write_text(json.dumps(kept))
    names = ["m:bf16", "m:nvfp4"]
    return argparse.Namespace(
        record=tmp_path / "record.json", engines=names, device="cpu", resume=True
    )


def measure(name: str, device: str) -> dict[str, Any]:
    return {"old": False, "kernels": os.environ["KERNELS_OF_THIS_TEST"]}


def recorded(arguments: argparse.Namespace) -> dict[str, tuple[bool, str | None]]:
    rows = json.loads(arguments.record.read_text())["rows"]
    return {row["engine"]: (row["old"], row.get("kernels")) for row in rows}


def test_a_resumed_record_keeps_its_engines_and_gets_the_others(
    arguments: argparse.Namespace,
) -> None:
    engines.record_engines(arguments, "serving", {"share": 0.9}, measure)
    assert recorded(arguments) == {"m:bf16": (True, None), "m:nvfp4": (False, "marlin")}


def test_a_record_of_another_setting_is_not_gone_on_with(arguments: argparse.Namespace) -> None:
    with pytest.raises(ValueError, match=r"record\.json: settings differs: name a new file"):
        engines.record_engines(arguments, "serving", {"share": 0.5}, measure)


def test_cases_are_added_to_a_record_of_the_same_setting_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused is refused before a case is run."""
    monkeypatch.setattr(zero_mismatch, "origin", lambda *_, **__: SETUP)
    monkeypatch.setattr(zero_mismatch, "vllm_version", lambda: "0.24.0")
    asked: list[str] = []

    def run(_: object, name: str, *__: object) -> list[dict[str, str]]:
        asked.append(name)
        return [{"case": name}]

    monkeypatch.setattr(zero_mismatch, "call_in_subprocess", run)
    record = tmp_path / "new" / "record.json"

    def add(*names: str) -> None:
        zero_mismatch.main(argparse.Namespace(record=record, device="cpu", cases=names))

    add("moe-128-nvfp4")
    add("control-amax", "dense-128-bf16")
    with pytest.raises(ValueError, match=r"--cases: control-amax: .*record\.json has them"):
        add("dense-64-bf16", "control-amax")
    edit_json(record, lambda kept: kept.update(benchmark="verl_runs"))
    with pytest.raises(ValueError, match=r"record\.json: benchmark differs: name a new file"):
        add("dense-64-bf16")
    assert asked == ["moe-128-nvfp4", "control-amax", "dense-128-bf16"]
    assert [row["case"] for row in read_json(record)["comparisons"]] == asked


@pytest.mark.parametrize("moved", [0, 1])
def test_steps_that_move_no_log_prob_are_no_comparison(
    moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer and engine would agree without a sync."""
    found = {"tokens": 1, "unequal": moved, "largest_difference": 0.0, "k3_kl": 0.0}
    stand_in = MagicMock(**{"compare.return_value": found, "sample.return_value": rollouts(0.0)})
    for name in ("Trainer", "start_engine", "write_random_checkpoint"):
        monkeypatch.setattr(zero_mismatch, name, lambda *_: stand_in)
    case = Case(DENSE, packed=False, states=(0, 1), batches=(2,), passes=1)
    refused = pytest.raises(ValueError, match="a case: steps 0 to 1 moved no log-prob")
    with nullcontext() if moved else refused:
        assert zero_mismatch.compare_case("a case", case, "cpu")[-1]["after"] == 1


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="is skipped"><skipped message="needs a GPU"/></testcase>
<testcase classname="a" name="is skipped too"><skipped message="needs a GPU"/></testcase>
<testcase classname="a" name="fails"><failure message="no"/></testcase>
<testcase classname="b" name="breaks"><error message="no fixture"/></testcase>
</testsuite></testsuites>"""


def test_outcomes_are_counted_and_failures_named(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(REPORT)
    assert outcomes(tmp_path / "junit.xml") == {
        "passed": 1,
        "skipped": {"needs a GPU": 2},
        "failed": ["a.fails", "b.breaks"],
    }


def test_the_page_says_what_was_recorded() -> None:
    page = (ROOT / "docs" / "verl.md").read_text()
    found = page.partition("<!-- versions -->")[2].partition("<!-- end versions -->")[0]
    assert found.strip() == table(json.loads(RECORD.read_text())["versions"].values())


COUNT = "needs a whole number above 0"
NO_GPU = "--device: cuda: no CUDA GPU here; --device cpu only rehearses"
MISTAKES = [
    ("parameter", ["--rounds", "0"], f"argument --rounds: 0: {COUNT}"),
    ("parameter", ["--worlds", "0"], f"argument --worlds: 0: {COUNT}"),
]
WITHOUT_GPU = [
    pytest.param(
        *named, NO_GPU, marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    )
    for named in (
        *(("parameter", []), ("parity", []), ("codec", [])),
        *(("rollout", ["qwen3-8b:bf16"]), ("serving", ["qwen3-8b:bf16"])),
    )
]


@pytest.mark.parametrize(("program", "options", "line"), [*MISTAKES, *WITHOUT_GPU])
def test_a_mistake_is_refused(
    program: str, options: list[str], line: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    record = tmp_path / "record.json"
    said = refusal(partial(run_cli, main), program, record, *options)
    # argparse puts the usage before it
    assert f"error: {line}" in said.splitlines()[-1]
    assert not record.exists()


def rollouts(log_prob: float) -> Rollouts:
    ones = torch.ones(1, 2, dtype=torch.long)
    log_probs = torch.full((1, 1), log_prob)
    done = torch.tensor([True])
    return Rollouts(ones, ones, ones[:, 1:].float(), log_probs, done)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "rows_at_least"), [("parameter", [], 8), ("fsdp", ["--worlds", "2"], 6)]
)
def test_what_a_benchmark_records_can_be_drawn(
    name: str, options: list[str], rows_at_least: int, tmp_path: Path
) -> None:
    arguments = (tmp_path / "new" / f"{name}_x.json", "--device", "cpu", "--rounds", "1", *options)
    done = module("experiments.benchmarks parameter", *arguments)
    assert done.returncode == 0, done.stderr
    rows = read_json(tmp_path / "new" / f"{name}_x.json")["rows"]
    assert len(rows) >= rows_at_least
    assert all(0 < row["issue_ms"][1] <= row["step_ms"][1] for row in rows)
    drawn = rows_sections(name)(tmp_path / "new", "x")
    assert len(drawn[1].splitlines()) == 2 + len(rows)


def test_a_job_with_several_files_counts_once_and_until_its_last(tmp_path: Path) -> None:
    """By what Snakemake notes of each file."""
    keys = "rule", "shellcmd", "starttime", "endtime"
    notes = [
        ("train", "first", 1.0, 4.5),
        ("train", "first", 1.0001, 5.0),
        ("train", "second", 2.0, 4.0),
        ("data", "third", 0.0, 9.0),
    ]
    for number, note in enumerate(notes):
        write_json(tmp_path / str(number), dict(zip(keys, note, strict=True)))
    found = stages(tmp_path)
    assert found["train_s"] == pytest.approx(6)
    assert sum(found.values()) == pytest.approx(6)


@pytest.mark.long
@pytest.mark.parametrize("arm", QAT_ARMS)
def test_a_step_after_a_change_measures_scales_and_rounds_again(arm: str) -> None:
    model = layer_stack("nano-dense", 2, "cpu", torch.bfloat16)
    changed = apply_arm(model, arm)
    inputs = step_inputs(model, 1, 4, "cpu")
    state = state_of(model)
    parameter.step(model, changed, *inputs)
    packed, whole = state.kept._packed, state.kept._whole
    refreshes, kept = state.num_refreshes, {**packed, **whole}
    assert set(packed if arm == "qat packed" else whole) == set(kept) == set(state.shapes)
    parameter.step(model, lambda: None, *inputs)
    assert state.num_refreshes == refreshes
    assert all({**packed, **whole}[name] is kept[name] for name in kept)
    parameter.step(model, changed, *inputs)
    assert state.num_refreshes == refreshes + 1
    assert not any({**packed, **whole}[name] is kept[name] for name in kept)
