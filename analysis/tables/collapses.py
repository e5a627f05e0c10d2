"""One row a study of collapses, model and advantage: how many runs collapsed, arm by arm."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.claims_table import read_table
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
    show_rate,
)
from analysis.markdown import MarkdownTable
from experiments.study.load import load_study
from experiments.study.schema import Study

ARMS = (NOQAT, QAT, BF16)
NOTE = (
    "Collapsed runs at each learning rate: the mean reward of 20 steps falls below half of the "
    "run's best. Verdict: of the claim that decides, at the highest rate. C1: without QAT runs "
    "collapse earlier than with QAT and in BF16; C6 and C7: likewise for an MoE and with other "
    "advantages, secondary; C9: mean reward is more than 0.05 below QAT's."
)


class Collapses(NamedTuple):
    """All rates of one model and advantage of a study.

    Attributes:
        settings: without QAT, ascending by rate; the other arms have the same rates.
        grid: outcomes of all arms.
        verdict: name and outcome of the claim about them; empty without one.
    """

    study: Study
    settings: tuple[Setting, ...]
    grid: Grid
    verdict: str

    @property
    def model(self) -> str:
        """Its name, and how the runs differ from the study's others of this model."""
        first = self.settings[0]
        varied = first.advantage != self.study.rl.advantage
        return f"{first.model}, {first.advantage}-centred" if varied else first.model

    def collapsed(self, arm: str) -> str:
        """Of an arm, such as "0, 4, 5 of 5"."""
        outcomes = [self.grid[it._replace(arm=arm)] for it in self.settings]
        counts = ", ".join(str(num_collapsed(it)) for it in outcomes)
        return f"{counts} of {len(outcomes[0])}"


TABLE: MarkdownTable[Collapses] = MarkdownTable(
    {
        "Study": lambda row: f"`{row.study.study}`",
        "Model": lambda row: row.model,
        "Trainer, rollouts": lambda row: f"{row.study.trainer}, {row.study.rollout}",
        "Learning rate": lambda row: ", ".join(show_rate(it.lr) for it in row.settings),
        "Without QAT": lambda row: row.collapsed(NOQAT),
        "QAT": lambda row: row.collapsed(QAT),
        "BF16": lambda row: row.collapsed(BF16),
        "Verdict": lambda row: row.verdict,
    }
)


def collapses_text(records: Path) -> str:
    """Markdown of all recorded studies of collapses.

    Raises:
        ValueError: a record is damaged.
    """
    files = sorted(records.glob("*/study.yaml"))
    studies = {path.parent: load_study(path) for path in files}
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
    verdicts = {it.name: it.verdict for it in read_table(record / "claims.json").claims}
    compared: dict[tuple[str, str], list[Setting]] = {}
    # the deciding claim's first
    for setting in sorted(grid, key=lambda it: (it.advantage != design.advantage, it.lr)):
        is_plain = setting.arm == NOQAT and setting.correction == "none"
        if is_plain and all(setting._replace(arm=arm) in grid for arm in ARMS):
            compared.setdefault((setting.model, setting.advantage), []).append(setting)
    for (model, advantage), settings in compared.items():
        claim = design.primary
        if model != design.dense:
            claim = "C6"
        elif advantage != design.advantage:
            claim = "C7"
        verdict = f"{claim} {verdicts[claim]}" if claim in verdicts else "too few seeds"
        yield Collapses(study, tuple(settings), grid, verdict)
