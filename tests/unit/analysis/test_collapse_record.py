"""The recorded study `collapse`: valid, judged as recorded, and recomputed here independently."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.claims_table import read_table
from analysis.collapse.data import GridData
from analysis.collapse.grid import BF16, NOQAT, QAT, Setting
from analysis.collapse.judge import judge_study
from analysis.collapse.survival import Outcome, log_rank
from experiments.runs.manifest import read_manifest
from experiments.runs.record import require_commit, require_one_base_a_seed, settings_of
from experiments.study.load import load_study
from experiments.study.schema import ROOT, STUDIES, Study

RECORD = ROOT / "experiments" / "records" / "collapse"
DENSE, STEPS = "small-dense", 200
MISSING = ("moe-lr3e-4", "dense-lr3e-4-ffn", "dense-lr3e-4-group")
Times = list[tuple[int, bool]]  # step, and whether the run collapsed at it


@pytest.fixture(scope="module")
def study() -> Study:
    return load_study(RECORD / "study.yaml")


def times(arm: str, cell: str) -> Times:
    """Steps of the collapses straight from the files, by loops."""
    found = []
    for seed in range(5):
        path = RECORD / f"{DENSE}_{arm}.{cell}_seed{seed}" / "metrics.csv.gz"
        reward = pd.read_csv(path)["critic/score/mean"].tolist()
        assert len(reward) == STEPS
        best, time = 0.0, (STEPS, False)
        for step in range(20, STEPS + 1):
            smooth = sum(reward[step - 20 : step]) / 20
            best = max(best, smooth)
            if smooth < best / 2:
                time = (step, True)
                break
        found.append(time)
    return found


def observed_less_expected(first: Times, second: Times) -> float:
    """Collapses of the first arm less those that are expected if both have one hazard."""
    total = 0.0
    for step in sorted({t for t, collapsed in first + second if collapsed}):
        at_risk = [sum(t >= step for t, _ in arm) for arm in (first, second)]
        events = [sum((t, c) == (step, True) for t, c in arm) for arm in (first, second)]
        total += events[0] - sum(events) * at_risk[0] / sum(at_risk)
    return total


def variance(first: Times, second: Times) -> float:
    total = 0.0
    for step in sorted({t for t, collapsed in first + second if collapsed}):
        n1, n2 = (sum(t >= step for t, _ in arm) for arm in (first, second))
        d = sum((t, c) == (step, True) for t, c in first + second)
        n = n1 + n2
        if n > 1:
            total += d * n1 * n2 * (n - d) / (n**2 * (n - 1))
    return total


def p_value(first: Times, second: Times) -> float:
    """Two-sided, over all divisions of the runs between the arms."""
    together = first + second

    def z(chosen: tuple[int, ...]) -> float:
        ours = [together[i] for i in chosen]
        theirs = [together[i] for i in range(len(together)) if i not in chosen]
        return abs(observed_less_expected(ours, theirs)) / variance(ours, theirs) ** 0.5

    seen = z(tuple(range(len(first))))
    drawn = [z(chosen) for chosen in combinations(range(len(together)), len(first))]
    return float(np.mean([value >= seen - 1e-9 for value in drawn]))


def test_runs_are_whole_of_committed_code_and_one_base_a_seed_and_cell(study: Study) -> None:
    by_cell: dict[str, list[Path]] = {}
    for run in study.runs:
        if run.cell not in MISSING:
            by_cell.setdefault(run.cell or "", []).append(RECORD / run.id)
    assert sum(map(len, by_cell.values())) == 60
    for cell, folders in by_cell.items():
        manifests = [read_manifest(folder, "record again") for folder in folders]
        require_one_base_a_seed(cell, manifests)
        for manifest, folder in zip(manifests, folders, strict=True):
            require_commit(manifest, folder)
            assert settings_of(manifest) == study.training_config(study.find_run(manifest.run))


def test_the_study_file_still_describes_the_recorded_runs(study: Study) -> None:
    now = load_study(STUDIES / "collapse.yaml")
    assert [now.training_config(r) for r in now.runs] == [
        study.training_config(r) for r in study.runs
    ]


def test_without_a_complete_cell_no_claim_is_judged(study: Study, tmp_path: Path) -> None:
    table = judge_study(study, tmp_path)
    assert {claim.verdict for claim in table.claims} == {"NOT RUN"}
    assert table.marks[DENSE] == (f"cells not complete, not judged: {', '.join(study.cells)}",)


def test_incomplete_cells_are_named_and_their_claims_open() -> None:
    table = read_table(RECORD / "claims.json")
    assert table.marks[DENSE][0] == f"cells not complete, not judged: {', '.join(MISSING)}"
    verdicts = {claim.name: claim.verdict for claim in table.claims}
    assert [name for name, it in verdicts.items() if it == "NOT RUN"] == ["C6", "C7", "C8"]


def test_what_readme_and_results_say_in_words() -> None:
    counts = {
        (arm, cell): sum(collapsed for _, collapsed in times(arm, cell))
        for arm in (BF16, NOQAT, QAT)
        for cell in ("dense-lr1e-4", "dense-lr2e-4", "dense-lr3e-4")
    }
    assert [counts[arm, "dense-lr1e-4"] for arm in (BF16, NOQAT, QAT)] == [0, 0, 0]
    assert [counts[arm, "dense-lr2e-4"] for arm in (BF16, NOQAT, QAT)] == [0, 4, 0]
    assert [counts[arm, "dense-lr3e-4"] for arm in (BF16, NOQAT, QAT)] == [4, 5, 3]
    assert max(time for time, _ in times(NOQAT, "dense-lr3e-4")) == 42
    table = read_table(RECORD / "claims.json")
    verdicts = {claim.name: claim.verdict for claim in table.claims}
    assert [verdicts[name] for name in ("C1", "C2", "C3", "C4", "C5")] == [
        "INCONCLUSIVE",
        "INCONCLUSIVE",
        "PASS",
        "PASS",
        "INCONCLUSIVE",
    ]


@pytest.mark.parametrize(
    ("first", "second", "cell"),
    [
        (NOQAT, QAT, "dense-lr3e-4"),
        (NOQAT, BF16, "dense-lr3e-4"),
        (QAT, BF16, "dense-lr3e-4"),
        (NOQAT, BF16, "dense-lr2e-4"),
    ],
)
def test_primary_p_values_recomputed(first: str, second: str, cell: str) -> None:
    arms = times(first, cell), times(second, cell)
    ours = [[Outcome(t if c else None, STEPS, 0.0) for t, c in arm] for arm in arms]
    assert log_rank(*ours).p_value == pytest.approx(p_value(*arms), abs=1e-12)


def test_area_is_the_mean_reward_and_c4_its_paired_t_interval(study: Study) -> None:
    data = GridData(study, RECORD)
    qat, bf16 = (
        np.array([it.area for it in data.grid[Setting(DENSE, arm, 2e-4)]]) for arm in (QAT, BF16)
    )
    difference = qat - bf16
    # 95 % quantile of Student's t with four degrees of freedom, from a printed table: to 4 digits
    half = 2.1318 * difference.std(ddof=1) / 5**0.5
    shown = (
        f"{difference.mean():+.3f} ({difference.mean() - half:+.3f} to "
        f"{difference.mean() + half:+.3f})"
    )
    claim = next(it for it in read_table(RECORD / "claims.json").claims if it.name == "C4")
    assert f"at 2e-4: {shown}" in claim.detail
