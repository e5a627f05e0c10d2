"""One row a study of collapses, model and advantage: how many runs collapsed, arm by arm."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.claims_table import MARK, read_table
from analysis.collapse.grid import (
    BF16,
    NOQAT,
    QAT,
    Grid,
    Setting,
    design_of,
    num_collapsed,
    read_grid,
    runs_by_setting,
    show_correction,
    show_rate,
)
from analysis.collapse.rules import AREA_LEVEL, AREA_MARGIN
from analysis.collapse.survival import paired_difference, show_difference
from analysis.load import recorded_study
from analysis.markdown import MarkdownTable
from experiments.study.schema import Study

NOTE = (
    "Collapsed runs at each learning rate: the mean reward of 20 steps falls below half of the "
    "run's best. Mean reward over all steps: without QAT minus with QAT, at the highest rate; "
    f"mean of the differences within a seed and its {100 * AREA_LEVEL:g} % interval over seeds, "
    "for description where neither C9 nor C10 judges it. A correction behind a count: of all of "
    "the study's runs without QAT. Verdict: of the claim that decides, at the highest rate. C1: "
    "without QAT runs collapse earlier than with QAT and in BF16; C6 and C7: likewise for an MoE "
    "and with other advantages, secondary; C4: QAT's mean reward is within "
    f"{AREA_MARGIN:g} of BF16's; C9: mean reward is more than {AREA_MARGIN:g} below QAT's. {MARK}: "
    "what a reader must know of these runs stands under the claims in experiments/records/STUDY."
)


class Collapses(NamedTuple):
    """All rates of one model and advantage of a study.

    Attributes:
        settings: without QAT, ascending by rate; the other arms have the same rates. Corrected
            where the study has none that is not; with QAT where it has none without.
        grid: outcomes of all arms.
        verdict: name and outcome of the claim about them; empty without one.
        is_marked: the study's table of claims says something of these runs.
    """

    study: Study
    settings: tuple[Setting, ...]
    grid: Grid
    verdict: str
    is_marked: bool

    @property
    def model(self) -> str:
        """Its name, how the runs differ from the study's others of this model, and a mark."""
        first = self.settings[0]
        varied = first.advantage != self.study.rl.advantage
        name = f"{first.model}, {first.advantage}-centred" if varied else first.model
        return f"{name} {MARK}" if self.is_marked else name

    def collapsed(self, arm: str) -> str:
        """Of an arm, such as "0, 4, 5 of 5"."""
        settings = [_beside(it, arm) for it in self.settings]
        if not self.grid.keys() >= set(settings):
            return "not run"
        outcomes = [self.grid[it] for it in settings]
        counts = ", ".join(str(num_collapsed(it)) for it in outcomes)
        of_all = f"{counts} of {len(outcomes[0])}"
        return ", ".join(filter(None, (of_all, show_correction(settings[0]))))

    @property
    def difference(self) -> str:
        """Of mean reward at the highest rate, with an interval where there are several seeds."""
        noqat = _beside(self.settings[-1], NOQAT)
        if noqat not in self.grid:
            return "not run"
        first, second = ([run.area for run in self.grid[it]] for it in (noqat, _beside(noqat, QAT)))
        if len(first) == 1:
            return f"{first[0] - second[0]:+.3f}"
        return show_difference(paired_difference(first, second, AREA_LEVEL))


def _beside(setting: Setting, arm: str) -> Setting:
    """That of an arm to compare a row's setting with; one without QAT alone is corrected."""
    return setting if arm == setting.arm else setting._replace(arm=arm, correction="none")


TABLE: MarkdownTable[Collapses] = MarkdownTable(
    {
        "Study": lambda row: f"`{row.study.study}`",
        "Model": lambda row: row.model,
        "Trainer, rollouts": lambda row: f"{row.study.trainer}, {row.study.rollout}",
        "Learning rate": lambda row: ", ".join(show_rate(it.lr) for it in row.settings),
        "Without QAT": lambda row: row.collapsed(NOQAT),
        "QAT": lambda row: row.collapsed(QAT),
        "BF16": lambda row: row.collapsed(BF16),
        "Mean reward, no QAT - QAT": lambda row: row.difference,
        "Verdict": lambda row: row.verdict,
    }
)


def collapses_text(records: Path) -> str:
    """Markdown of all recorded studies of collapses.

    Raises:
        ValueError: a record is damaged.
    """
    files = sorted(records.glob("*/study.yaml"))
    studies = {path.parent: recorded_study(path.parent) for path in files}
    rows = [
        row
        for record, study in studies.items()
        if study.judged_by == "collapse"
        for row in _rows(record, study)
    ]
    return f"{TABLE.markdown(rows)}\n\n{NOTE}\n"


def _rows(record: Path, study: Study) -> Iterator[Collapses]:
    design = design_of(study)
    grid = read_grid(runs_by_setting(study, record), record)
    table = read_table(record / "claims.json")
    verdicts = {it.name: it.verdict for it in table.claims}
    compared: dict[tuple[str, str], list[Setting]] = {}
    is_plain = any((it.arm, it.correction) == (NOQAT, "none") for it in design.settings)
    compared_arm = NOQAT if any(it.arm == NOQAT for it in design.settings) else QAT
    # the deciding claim's first
    for setting in sorted(grid, key=lambda it: (it.advantage != design.advantage, it.lr)):
        if setting.arm != compared_arm or (is_plain and setting.correction != "none"):
            continue
        if _beside(setting, QAT) in grid:
            compared.setdefault((setting.model, setting.advantage), []).append(setting)
    for (model, advantage), settings in compared.items():
        claim = design.primary
        if model != design.dense:
            claim = "C6"
        elif advantage != design.advantage:
            claim = "C7"
        verdict = f"{claim} {verdicts[claim]}" if claim in verdicts else "too few seeds"
        yield Collapses(study, tuple(settings), grid, verdict, any(table.marks.values()))
