"""The smallest study, all the way: trained, evaluated, judged, drawn, tracked and recorded."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from analysis.figure_files import DRIFT, figure_names
from experiments.runs.attempts import list_run_dirs
from experiments.runs.record import has_file
from experiments.study.load import load_study
from tests.files import read_rows
from tests.workflow.programs import (
    SLOW_IMPORTS,
    SMOKE,
    Done,
    copy_repository,
    imported,
    module,
    snakemake,
)

RUNS = [run.id for run in load_study(SMOKE).runs]
STEPS = load_study(SMOKE).rl.steps
NAMES = figure_names(load_study(SMOKE))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """The folder of a finished study and what Snakemake said; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("smoke")
    study = shutil.copy(SMOKE, folder / "study.yaml")
    done = snakemake("--configfile", study, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


@pytest.fixture(scope="module")
def folder(first: tuple[Path, Done]) -> Path:
    return first[0]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to change files in; a new one for each would compile all of its modules again."""
    root = tmp_path_factory.mktemp("copy") / "repository"
    copy_repository(root)
    return root


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("run_id", RUNS)
def test_metrics_hold_every_step_with_verls_names(folder: Path, run_id: str) -> None:
    rows = read_rows(folder / "results" / run_id / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    wanted = {"rollout_corr/k3_kl", "rollout_corr/abs_diff_p99", "critic/score/mean"}
    wanted |= {"actor/entropy", "timing_s/step", "perf/throughput", "response_length/mean"}
    assert all(wanted <= row.keys() for row in rows)


@pytest.mark.parametrize("run_id", RUNS)
def test_manifest_tells_where_the_numbers_come_from(folder: Path, run_id: str) -> None:
    manifest = read_json(folder / "results" / run_id / "manifest.json")
    assert manifest["status"] == "finished" and manifest["reason"] is None
    assert set(manifest["digests"]) == {"config", "code", "data", "lock", "base"}
    assert all(len(digest) == 64 for digest in manifest["digests"].values())
    assert manifest["versions"]["torch"] and manifest["hardware"]["cores"] >= 1
    assert manifest["wall_s"] > 0


def test_packed_weights_measure_what_shapes_predict(folder: Path) -> None:
    memory = {
        run_id: read_json(folder / "results" / run_id / "manifest.json")["memory"]
        for run_id in RUNS
    }
    assert memory["tiny_bf16_seed0"]["measured_packed_gib"] is None
    for run_id in RUNS:
        of_run = memory[run_id]
        assert of_run["measured_bf16_gib"] == pytest.approx(of_run["predicted_bf16_gib"])
    packed = memory["tiny_nvfp4-qat_seed0"]
    # a fused group shares one global scale of 4 bytes where the prediction counts one a matrix
    assert packed["measured_packed_gib"] == pytest.approx(packed["predicted_packed_gib"], rel=0.01)


@pytest.mark.parametrize("run_id", RUNS)
def test_every_arm_is_evaluated_in_both_precisions(folder: Path, run_id: str) -> None:
    records = read_json(folder / "results" / run_id / "eval.json")
    settings = {(r["step"], r["precision"], r["decoding"]) for r in records}
    expected = {
        (step, precision, "sampled") for step in (0, 2, 4, STEPS) for precision in ("bf16", "nvfp4")
    }
    assert settings == expected


def test_the_report_holds_claims_and_figures_and_says_what_made_it(folder: Path) -> None:
    page = (folder / "results" / "studies" / "smoke" / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == len(NAMES)
    assert all(f"{run_id}/metrics.jsonl" in page for run_id in RUNS)
    again = folder / "again.html"
    arguments = ("--study", folder / "study.yaml", "--results", folder / "results")
    done = module("analysis.report", *arguments, "--out", again, folder=folder)
    assert done.returncode == 0 and again.read_text() == page
    again.unlink()


def test_progress_and_claims_are_on_the_terminal(first: tuple[Path, Done]) -> None:
    _, done = first
    said = " ".join(done.stdout.split())
    for run_id in RUNS:
        assert f"{run_id} step {STEPS}/{STEPS} k3 KL " in said
    assert said.rindex("noise floor") > said.rindex(" left")


@pytest.mark.parametrize("run_id", RUNS)
def test_logs_hold_what_the_terminal_showed(folder: Path, run_id: str) -> None:
    log = (folder / "results" / run_id / "attempts" / "1" / "train.log").read_text()
    assert log == (folder / "logs" / "train" / f"{run_id}.log").read_text()
    assert log.count(" step ") == STEPS


def test_a_second_run_of_the_study_with_a_comment_in_another_file_does_nothing_and_is_quick(
    folder: Path, tmp_path: Path
) -> None:
    study = tmp_path / "b.yaml"
    study.write_text(f"{SMOKE.read_text()}# why\n")
    done = snakemake("--configfile", study, folder=folder, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout + done.stderr
    assert not SLOW_IMPORTS & imported(done)


@pytest.mark.parametrize(
    ("old", "new", "again", "kept"),
    [
        ("{prompts: 4}", "{prompts: 3}", {"evaluate", "compare"}, {"train", "base"}),
        ("lr: 1.0e-4", "lr: 2.0e-4", {"train", "evaluate"}, {"base"}),
        ("steps: 20,", "steps: 21,", {"base", "train"}, set()),
        (
            "study: smoke",
            "study: smoke\nclaims: {accuracy_log_odds: 0.9}",
            {"compare", "figures", "report"},
            {"base", "train", "evaluate"},
        ),
    ],
    ids=["evaluation", "training", "base", "claims"],
)
def test_a_change_redoes_what_depends_on_it_alone(
    folder: Path, old: str, new: str, again: set[str], kept: set[str]
) -> None:
    study = folder / "study.yaml"
    text = study.read_text()
    assert text.count(old) == 1
    study.write_text(text.replace(old, new))
    try:
        done = snakemake("-n", "--configfile", study, folder=folder)
    finally:
        study.write_text(text)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    jobs = {line.split()[0] for line in lines if line.strip()}
    assert again <= jobs and not kept & jobs


DRAWN = {"figures", "report", "publish"}
JUDGED = {"evaluate", "compare"} | DRAWN


@pytest.mark.parametrize(
    ("file", "old", "new", "again"),
    [
        ("docs/protocols/kl-claim.md", "# ", "## ", {"report"}),
        ("analysis/metrics.yaml", "k3 estimate", "KL", DRAWN),
        ("analysis/style.py", "#0072b2", "#0072b3", DRAWN),
        ("qat_core/rollout/vllm/humming/library.py", "needs humming", "wants humming", set()),
        ("qat_core/nvfp4/kernels.py", "tl.load(", "2 * tl.load(", set()),
        ("experiments/rl/loss.py", "return ", "return 2 * ", {"train"} | JUDGED),
    ],
)
def test_a_changed_file_redoes_what_it_made(
    folder: Path, repository: Path, file: str, old: str, new: str, again: set[str]
) -> None:
    text = (repository / file).read_text()
    assert old in text
    (repository / file).write_text(text.replace(old, new))
    study = folder / "study.yaml"
    try:
        done = snakemake("-n", "--configfile", study, folder=folder, root=repository)
    finally:
        (repository / file).write_text(text)
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    jobs = {line.split()[0] for line in lines if re.fullmatch(r"\w+ +\d+", line)}
    assert jobs - {"all", "total"} == again


def summarize(store: Path) -> dict[str, Any]:
    """All runs of a store: status, params, tags and the last value of each metric."""
    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("smoke")
    return {
        run.data.tags["run"]: (
            run.info.status,
            run.data.params,
            {key: v for key, v in run.data.tags.items() if not key.startswith("mlflow.")},
            run.data.metrics,
            sorted(a.path for a in client.list_artifacts(run.info.run_id)),
        )
        # arms are tagged as the study is, whose own run begins last
        for run in client.search_runs([experiment.experiment_id], order_by=["start_time ASC"])
    }


def test_mlflow_has_each_run_and_the_study_with_its_figures(folder: Path) -> None:
    runs = summarize(folder / "mlflow.db")
    assert set(runs) == {*RUNS, "study"}
    assert all(status == "FINISHED" for status, *_ in runs.values())
    assert "eval/nvfp4/sampled" in runs[RUNS[0]][3]
    assert {"claims.md", "figures"} <= set(runs["study"][4])


def test_lost_mlflow_store_comes_back_and_trains_nothing(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "mlflow.db").unlink()
    again = ("--configfile", copy / "study.yaml", "--forcerun", "publish")
    done = snakemake(*again, folder=copy)
    assert done.returncode == 0, done.stderr
    assert "Training" not in done.stdout + done.stderr
    assert summarize(copy / "mlflow.db") == summarize(folder / "mlflow.db")


def test_record_holds_all_that_the_claims_and_figures_need(folder: Path, tmp_path: Path) -> None:
    places = ("--results", folder / "results", "--records", ".", "--allow-uncommitted")
    done = module("analysis.record", "--study", SMOKE, *places, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    record = tmp_path / "smoke"
    runs = [it for it in list_run_dirs(record) if has_file(it, "drift.jsonl")]
    assert DRIFT in NAMES and [it.name for it in runs] == RUNS[1:]
    for name in ("claims", "figures"):
        out = record / name
        done = module(
            f"analysis.{name}",
            "--study",
            record / "study.yaml",
            "--results",
            record,
            "--out",
            out,
            folder=tmp_path,
        )
        assert done.returncode == 0, done.stderr
    study_dir = folder / "results" / "studies" / "smoke"
    assert read_json(record / "claims" / "claims.json") == read_json(study_dir / "claims.json")
    for name in NAMES:
        drawn = (record / "figures" / f"{name}.png").read_bytes()
        assert drawn == (study_dir / "figures" / f"{name}.png").read_bytes()


@pytest.mark.long
def test_a_record_is_verified_with_fresh_seeds(folder: Path, tmp_path: Path) -> None:
    copy, record = tmp_path / "copy", tmp_path / "records" / "smoke"
    shutil.copytree(folder, copy)  # with the base checkpoint, which the smoke study's seeds share
    places = ("--results", copy / "results", "--records", record.parent, "--allow-uncommitted")
    done = module("analysis.record", "--study", SMOKE, *places, folder=copy)
    assert done.returncode == 0, done.stderr
    planned = copy / "planned.yaml"
    done = module("analysis.replication", "plan", record, "--out", planned, folder=copy)
    assert done.stdout == f"{planned}: seeds 1\n", done.stderr
    done = snakemake("--configfile", planned, folder=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    done = module("analysis.replication", "judge", record, "--study", planned, folder=copy)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any(
        line.startswith("nothing to hold tiny: k3 KL, qat / bf16 REPORTED") for line in lines
    )
    assert read_json(copy / "results" / "tiny_bf16_seed1" / "manifest.json")["seed"] == 1


def test_results_of_other_settings_are_not_recorded(folder: Path, tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(SMOKE.read_text().replace("lr: 1.0e-4", "lr: 2.0e-4"))
    places = ("--results", folder / "results", "--records", "records")
    done = module("analysis.record", "--study", study, *places, folder=tmp_path)
    assert done.returncode == 2
    found = f"{RUNS[0]}/manifest.json: config.rl.lr: 0.0001, and in study smoke 0.0002; run the"
    assert found in done.stderr
    assert not (tmp_path / "records").exists()


def test_a_run_that_lost_its_drift_is_not_recorded(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "results", tmp_path / "results")
    (tmp_path / "results" / RUNS[1] / "drift.jsonl").unlink()
    done = module("analysis.record", "--study", SMOKE, folder=tmp_path)
    assert done.returncode == 2
    assert f"{RUNS[1]}/drift.jsonl: missing; run study smoke to its end first" in done.stderr
