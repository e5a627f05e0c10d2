"""What MLflow shows first: short names, summary metrics, a saved view, the study's claims."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from analysis.style import ARM_STYLES
from experiments.runs.evaluation import write_evaluations
from experiments.runs.summary import (
    ACCURACIES,
    KL,
    KL_RATIO,
    MIB,
    REWARD_MEAN,
    SHARE,
    ArmSummary,
    summarize,
)
from experiments.support.json_files import write_json, write_jsonl
from experiments.tracking import publish
from experiments.tracking import rebuild as rebuilding
from experiments.tracking.glance import (
    CELL_COLORS,
    CHARTS,
    COLLAPSED,
    COLORS,
    COLUMNS,
    NOTE,
    PARENT,
    SHARED_VIEW,
)
from experiments.tracking.rebuild import rebuild
from tests.files import edit_json, set_keys
from tests.records import make_evaluation, make_manifest

ROWS = {"bf16": [(1e-6, 10), (3e-6, 30)], "nvfp4-qat": [(4e-6, 10), (4e-6, 30)]}
CLAIM = {
    "model": "nano-moe",
    "name": "qat_kl_ratio",
    "statement": "k3 KL, nvfp4-qat / bf16",
    "estimate": 1.6,
    "low": 0.25,
    "high": "Infinity",
    "bound": "at most",
    "threshold": 2.0,
    "verdict": "INCONCLUSIVE",
}

MARKS = {"nano-moe": ["1 of the protocol's 5 seeds"], "nano-dense": []}


def arm_of(arm: str) -> dict[str, object]:
    estimates = {KL_RATIO: {"estimate": 1.6, "low": 1.2, "high": 2.0}, MIB: {"estimate": 256}}
    runs = [f"nano-moe_{arm}_seed2"]
    return {"model": "nano-moe", "arm": arm, "cell": None, "runs": runs, "estimates": estimates}


def write_run(run_dir: Path, arm: str, rows: list[tuple[float, int]]) -> None:
    """A finished one of an attempt with these KLs and lengths."""
    run_dir.mkdir(parents=True)
    packed = {} if arm == "bf16" else {"measured_packed_gib": 0.25, "predicted_packed_gib": 0.2}
    memory = {"predicted_bf16_gib": 0.5, "measured_bf16_gib": 0.5} | packed
    names = {"run": run_dir.name, "model": "nano-moe", "arm": arm, "seed": 2, "seeds": {"run": 2}}
    manifest = make_manifest(**names, status="finished", memory=memory, wall_s=60.0)
    manifest.write(run_dir)
    steps = [
        {"step": step, "rollout_corr/k3_kl": kl, "response_length/mean": tokens}
        | {"critic/score/mean": 0.25 * step}
        for step, (kl, tokens) in enumerate(rows, start=1)
    ]
    attempt = run_dir / "attempts" / "1"
    attempt.mkdir(parents=True)
    manifest.write(attempt)
    write_jsonl(attempt / "metrics.jsonl", steps)
    evaluated = [
        make_evaluation([1, second], step=step, precision=precision, decoding="sampled")
        for step, second in ((0, 0), (2, 1))
        for precision in ("bf16", "nvfp4")
    ]
    write_evaluations(run_dir, evaluated)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two finished runs of one seed and the judged claims of their study."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "record"
    for arm, rows in ROWS.items():
        write_run(folder / f"nano-moe_{arm}_seed2", arm, rows)
    judged = {
        "study": "s",
        "claims": [CLAIM],
        "marks": MARKS,
        "arms": [arm_of(arm) for arm in ROWS],
        "collapsed_at": {"nano-moe_nvfp4-qat_seed2": 3},
    }
    write_json(folder / "claims.json", judged)
    return folder


def test_arms_have_the_colours_of_the_figures() -> None:
    assert {arm: style.color for arm, style in ARM_STYLES.items()} == COLORS


def test_an_arms_further_cells_have_colours_that_no_arm_has() -> None:
    names = [("nvfp4-noqat", "a"), ("bf16", "a"), ("nvfp4-noqat", "b"), ("bf16", "b")]
    arms = [ArmSummary(model="m", arm=arm, cell=it, runs=(), estimates={}) for arm, it in names]
    shown = [publish._color(arm, arms) for arm in arms]
    assert shown == [COLORS["nvfp4-noqat"], COLORS["bf16"], *CELL_COLORS[:2]]
    assert not set(CELL_COLORS) & set(COLORS.values())


def test_a_run_of_a_cell_is_compared_in_its_cell(results: Path) -> None:
    for arm in ROWS:
        run_dir = results / f"nano-moe_{arm}_seed2"
        in_cell = run_dir.with_name(f"nano-moe_{arm}.low_seed2")
        for folder in (run_dir, run_dir / "attempts" / "1"):
            set_keys(folder / "manifest.json", run=in_cell.name, cell="low")
        run_dir.rename(in_cell)
    assert summarize(in_cell)[KL_RATIO] == pytest.approx(1.6)


def test_summary_is_of_all_tokens_and_over_bf16(results: Path) -> None:
    # mean of BF16: (1e-6 x 10 + 3e-6 x 30) / 40
    assert summarize(results / "nano-moe_nvfp4-qat_seed2") == pytest.approx(
        {
            KL: 4e-6,
            KL_RATIO: 1.6,
            REWARD_MEAN: 0.375,
            ACCURACIES["nvfp4"]: 1.0,
            ACCURACIES["bf16"]: 1.0,
            MIB: 256.0,
            SHARE: 0.5,
        }
    )
    assert summarize(results / "nano-moe_bf16_seed2")[KL] == pytest.approx(2.5e-6)


def test_runs_and_study_are_in_mlflow_with_view_and_claims(results: Path) -> None:
    rebuild(results)
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("s")
    state = json.loads(experiment.tags[SHARED_VIEW])
    assert f"metrics.`{COLUMNS[KL]}`" in state["selectedColumns"]
    assert set(state["selectedColumns"]) < set(state["columnWidths"]) == set(state["columnOrder"])
    assert [chart["metricKey"] for chart in state["compareRunCharts"]] == list(CHARTS)
    found = client.search_runs(
        [experiment.experiment_id], order_by=["attributes.start_time", "tags.run DESC"]
    )
    runs = {it.info.run_name: it for it in found}
    assert [name for name in runs if not name.endswith("s2")] == ["moe bf16", "moe qat", "study"]
    seed, arm = runs["moe qat s2"], runs["moe qat"]
    assert seed.data.tags[PARENT] == arm.info.run_id
    assert seed.data.metrics[COLUMNS[KL_RATIO]] == arm.data.metrics[COLUMNS[KL_RATIO]] == 1.6
    assert seed.data.metrics[COLLAPSED] == arm.data.metrics[COLLAPSED] == 1
    assert runs["moe bf16"].data.metrics[COLLAPSED] == 0
    assert "k3 KL over BF16's: 1.6 (1.2 to 2)" in arm.data.tags[NOTE]
    curve = client.get_metric_history(arm.info.run_id, "rollout_corr/k3_kl")
    assert [(it.step, it.value) for it in curve] == [(1, 4e-6), (2, 4e-6)]
    study = runs["study"]
    assert study.data.metrics == {"claims/nano-moe/qat_kl_ratio": 1.6, "verdicts/INCONCLUSIVE": 1}
    line = "* **INCONCLUSIVE** nano-moe, k3 KL, nvfp4-qat / bf16: 1.6 (0.25 to inf), at most 2"
    mark = "* nano-moe: 1 of the protocol's 5 seeds"
    assert study.data.tags[NOTE] == f"{mark}\n{line}"
    assert experiment.tags[NOTE] == f"Claims: 1 INCONCLUSIVE\n\n{mark}\n{line}"
    # both runs started at once and took a minute
    assert study.info.end_time - seed.info.start_time == 60_000


def test_a_renamed_studys_runs_stay_in_the_experiment_of_its_old_name(results: Path) -> None:
    rebuild(results)
    edit_json(results / "claims.json", lambda it: it.update(study="renamed"))
    publish.publish_study(results, results)
    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    names = []
    for study in ("s", "renamed"):
        found = client.search_runs([client.get_experiment_by_name(study).experiment_id])
        names.append({it.info.run_name for it in found})
    assert "moe qat s2" in names[0] and names[1] == {"moe bf16", "moe qat", "study"}


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda it: it.pop("study"), "claims.json: study: missing; judge the study again"),
        (
            lambda it: it["claims"][0].update(name="a\n'b"),
            "claims.json: claims.0.name: String should",
        ),
    ],
    ids=["no study", "a name that MLflow refuses"],
)
def test_damaged_claims_are_named(
    results: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any], object], line: str
) -> None:
    edit_json(results / "claims.json", damage)
    monkeypatch.setattr(rebuilding, "rebuild_run", lambda run_dir: "")
    with pytest.raises(ValueError, match=re.escape(line)):
        rebuild(results)
