"""The recorded studies of collapses: valid, judged as recorded, recomputed independently."""

from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from analysis.claims_table import read_table
from analysis.collapse.data import GridData
from analysis.collapse.grid import BF16, NOQAT, QAT, Setting
from analysis.collapse.judge import judge_study
from analysis.collapse.outcome_table import outcome_table
from analysis.collapse.survival import Outcome, log_rank
from analysis.record import recorded_run, require_commit, require_one_base_a_seed
from experiments.runs.record import write_record
from experiments.runs.settings import read_run
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study
from tests.records import recorded_evaluations, recorded_metrics


class Record(NamedTuple):
    """What the tests know of a recorded study, on purpose not from its file."""

    name: str
    file: str
    dense: str
    steps: int
    seeds: range
    num_runs: int

    @property
    def folder(self) -> Path:
        return ROOT / "experiments" / "records" / self.name

    @property
    def study(self) -> Study:
        return load_study(self.folder / "study.yaml")


GRID = Record("collapse", "collapse.yaml", "small-dense", 200, range(5), 95)
CONFIRM = Record(
    "collapse-confirm", "collapse_confirm.yaml", "small-dense-confirm", 240, range(10, 20), 50
)
BOTH = pytest.mark.parametrize("record", [GRID, CONFIRM], ids=["grid", "confirmation"])
Times = list[tuple[int, bool]]  # step, and whether the run collapsed at it


def times(record: Record, arm: str, cell: str, model: str = "") -> Times:
    """Steps of the collapses straight from the files, by loops."""
    found = []
    for seed in record.seeds:
        run = f"{model or record.dense}_{arm}.{cell}_seed{seed}"
        reward = recorded_metrics(record.folder / run)["critic/score/mean"].tolist()
        assert len(reward) == record.steps
        best, time = 0.0, (record.steps, False)
        for step in range(20, record.steps + 1):
            smooth = sum(reward[step - 20 : step]) / 20
            best = max(best, smooth)
            if smooth < best / 2:
                time = (step, True)
                break
        found.append(time)
    return found


def p_value(first: Times, second: Times) -> float:
    """Log-rank test, two-sided, over all divisions D of the runs between the arms."""
    together = first + second
    steps = np.array([step for step, _ in together])
    collapsed = np.array([it for _, it in together])
    # the first division is the one that was made
    chosen_DS = np.array(list(combinations(range(len(together)), len(first))))
    member_DR = np.zeros((len(chosen_DS), len(together)), dtype=int)
    np.put_along_axis(member_DR, chosen_DS, 1, axis=1)
    excess_D, variance_D = np.zeros(len(member_DR)), np.zeros(len(member_DR))
    for step in np.unique(steps[collapsed]):
        at_risk, events = steps >= step, collapsed & (steps == step)
        n, d, n1_D = at_risk.sum(), events.sum(), member_DR @ at_risk.astype(int)
        excess_D += member_DR @ events.astype(int) - d * n1_D / n
        if n > 1:
            variance_D += d * n1_D * (n - n1_D) * (n - d) / (n**2 * (n - 1))
    z_D = np.abs(excess_D) / np.sqrt(variance_D)
    return float(np.mean(z_D >= z_D[0] - 1e-9))


@BOTH
def test_runs_are_whole_of_committed_code_and_one_base_a_seed_and_cell(record: Record) -> None:
    study, by_cell = record.study, dict[str, list[Path]]()
    for run in study.runs:
        by_cell.setdefault(run.cell or "", []).append(record.folder / run.id)
    assert sum(map(len, by_cell.values())) == record.num_runs
    for cell, folders in by_cell.items():
        runs = [study.find_run(folder.name) for folder in folders]
        manifests = [read_run(study, run, record.folder, "record again") for run in runs]
        require_one_base_a_seed(cell, manifests)
        for manifest, folder in zip(manifests, folders, strict=True):
            require_commit(manifest, folder)


@BOTH
def test_the_claims_file_names_the_runs_that_collapsed(record: Record) -> None:
    found = {}
    for model, arm, cell in {(run.model, run.arm, run.cell) for run in record.study.runs}:
        its = zip(record.seeds, times(record, arm, cell or "", model), strict=True)
        found |= {f"{model}_{arm}.{cell}_seed{seed}": step for seed, (step, yes) in its if yes}
    assert read_table(record.folder / "claims.json").collapsed_at == found


@BOTH
def test_the_study_file_still_describes_the_recorded_runs(record: Record) -> None:
    now, study = load_study(STUDIES / record.file), record.study
    assert [now.training_config(r) for r in now.runs] == [
        study.training_config(r) for r in study.runs
    ]


@BOTH
def test_without_a_complete_cell_no_claim_is_judged(record: Record, tmp_path: Path) -> None:
    study = record.study
    table = judge_study(study, tmp_path)
    assert {claim.verdict for claim in table.claims} == {"NOT RUN"}
    cells = f"cells not complete, not judged: {', '.join(study.cells)}"
    assert table.marks[record.dense] == (cells,)


def test_a_recorded_cell_that_is_gone_is_named_and_its_claims_open(tmp_path: Path) -> None:
    kept = [run for run in GRID.study.runs if run.cell != "moe-lr3e-4"]
    write_record(tmp_path, {run.id: recorded_run(GRID.folder / run.id) for run in kept})
    table = judge_study(GRID.study, tmp_path)
    assert table.marks[GRID.dense][0] == "cells not complete, not judged: moe-lr3e-4"
    assert [it.name for it in table.claims if it.verdict == "NOT RUN"] == ["C6"]


def test_offline_accuracies_of_the_table_are_of_sampled_answers() -> None:
    shown = {}
    for decoding in ("sampled", "greedy"):
        accuracies = []
        for seed in CONFIRM.seeds:
            run = CONFIRM.folder / f"{CONFIRM.dense}_{QAT}.lr2e-4_seed{seed}"
            accuracies += [
                it["accuracy"]
                for it in recorded_evaluations(run)
                if (it["step"], it["precision"], it["decoding"]) == (240, "nvfp4", decoding)
            ]
        assert len(accuracies) == len(CONFIRM.seeds)
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        shown[decoding] = f"{np.mean(accuracies):.3f} ({spread})"
    table = outcome_table(CONFIRM.study, CONFIRM.folder).splitlines()
    (row,) = (line for line in table if line.startswith(f"| {QAT} |"))
    assert shown["sampled"] != shown["greedy"]
    assert row.endswith(f"| {shown['sampled']} |")
    collapses = zip(CONFIRM.seeds, times(CONFIRM, QAT, "lr2e-4"), strict=True)
    steps = ", ".join(f"{step} ({seed})" for seed, (step, is_dead) in collapses if is_dead)
    assert f"| {steps} |" in row


@pytest.mark.parametrize(
    ("record", "first", "second", "cell"),
    [
        (GRID, NOQAT, QAT, "dense-lr3e-4"),
        (GRID, NOQAT, BF16, "dense-lr3e-4"),
        (GRID, QAT, BF16, "dense-lr3e-4"),
        (GRID, NOQAT, BF16, "dense-lr2e-4"),
        (CONFIRM, NOQAT, QAT, "lr2e-4"),
        (CONFIRM, NOQAT, BF16, "lr2e-4"),
        (CONFIRM, QAT, BF16, "lr2e-4"),
    ],
)
def test_primary_p_values_recomputed(record: Record, first: str, second: str, cell: str) -> None:
    arms = times(record, first, cell), times(record, second, cell)
    ours = [[Outcome(t if c else None, record.steps, 0.0, 0.0) for t, c in arm] for arm in arms]
    assert log_rank(*ours).p_value == pytest.approx(p_value(*arms), abs=1e-12)


def test_area_is_the_mean_reward_and_c4_its_paired_t_interval() -> None:
    data = GridData(GRID.study, GRID.folder)
    qat, bf16 = (
        np.array([it.area for it in data.grid[Setting(GRID.dense, arm, 2e-4)]])
        for arm in (QAT, BF16)
    )
    difference = qat - bf16
    # 95 % quantile of Student's t with four degrees of freedom, from a printed table: to 4 digits
    half = 2.1318 * difference.std(ddof=1) / 5**0.5
    shown = (
        f"{difference.mean():+.3f} ({difference.mean() - half:+.3f} to "
        f"{difference.mean() + half:+.3f})"
    )
    claim = next(it for it in read_table(GRID.folder / "claims.json").claims if it.name == "C4")
    assert f"at 2e-4, 90 % interval: {shown}" in claim.detail
