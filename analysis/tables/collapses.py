"""One row a study of collapses, model and advantage: how many runs collapsed, arm by arm."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.claims_table import MARK, read_table
from analysis.collapse.grid import (
    BF16,
    BF16_EXACT,
    NOQAT,
    QAT,
    QAT_EXACT,
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
from analysis.markdown import Row, markdown_table

NOTE = (
    "Collapsed runs at each learning rate: the mean reward of 20 steps falls below half of the "
    "run's best. Mean reward over all steps: without QAT minus with QAT, at the highest rate; "
    f"mean of the differences within a seed and its {100 * AREA_LEVEL:g} % interval over seeds, "
    "for description where neither C9 nor C10 judges it. A correction behind a count: of all of "
    "the study's runs without QAT. Verdict: of the claim that decides, at the highest rate. C1: "
    "without QAT runs collapse earlier than with QAT and in BF16; C6 and C7: likewise for an MoE "
    "and with other advantages, secondary; C4: QAT's mean reward is within "
    f"{AREA_MARGIN:g} of BF16's; C9: mean reward is more than {AREA_MARGIN:g} below QAT's; C12 and "
    "C13: QAT and BF16 collapse less often in exact mode. "
    f"{MARK}: what a reader must know of these runs stands under the claims in "
    "experiments/records/STUDY."
)


def collapses_text(records: Path) -> str:
    """Markdown of all recorded studies of collapses."""
    found = [it.parent for it in sorted(records.glob("*/study.yaml"))]
    judged = [it for it in found if recorded_study(it).judged_by == "collapse"]
    return f"{markdown_table(row for record in judged for row in _rows(record))}\n\n{NOTE}\n"


def _rows(record: Path) -> Iterator[Row]:
    """A row for each model and advantage; the deciding claim's first."""
    study, table = recorded_study(record), read_table(record / "claims.json")
    design, grid = design_of(study), read_grid(runs_by_setting(study, record), record)
    verdicts = {it.name: it.verdict for it in table.claims}
    is_plain = any((it.arm, it.correction) == (NOQAT, "none") for it in design.settings)
    arms = {it.arm for it in design.settings}
    compared_arm = next(it for it in (NOQAT, QAT, BF16) if it in arms)
    compared: dict[tuple[str, str], list[Setting]] = {}
    for setting in sorted(grid, key=lambda it: (it.advantage != design.advantage, it.lr)):
        if setting.arm != compared_arm or (is_plain and setting.correction != "none"):
            continue
        if {_beside(setting, it) for it in (QAT, BF16_EXACT)} & grid.keys():
            compared.setdefault((setting.model, setting.advantage), []).append(setting)
    for (model, advantage), settings in compared.items():
        is_usual = advantage == design.advantage
        primary = "C13" if compared_arm == BF16 else design.primary
        claim = "C6" if model != design.dense else primary if is_usual else "C7"
        named = model if is_usual else f"{model}, {advantage}-centred"
        yield {
            "Study": f"`{study.study}`",
            "Model": f"{named} {MARK}" if any(table.marks.values()) else named,
            "Trainer, rollouts": f"{study.trainer}, {study.rollout}",
            "Learning rate": ", ".join(show_rate(it.lr) for it in settings),
            "Without QAT": _collapsed(grid, settings, NOQAT),
            "QAT": _collapsed(grid, settings, QAT, QAT_EXACT),
            "BF16": _collapsed(grid, settings, BF16, BF16_EXACT),
            "Mean reward, no QAT - QAT": _difference(grid, settings[-1]),
            "Verdict": f"{claim} {verdicts[claim]}" if claim in verdicts else "too few seeds",
        }


def _beside(setting: Setting, arm: str) -> Setting:
    """That of an arm to compare a row's setting with; one without QAT alone is corrected."""
    return setting if arm == setting.arm else setting._replace(arm=arm, correction="none")


def _collapsed(grid: Grid, settings: Sequence[Setting], arm: str, exact: str = "") -> str:
    """Of an arm at each rate, such as "0, 4, 5 of 5"; where it ran, of the exact arm too."""
    beside = [_beside(it, arm) for it in settings]
    if not grid.keys() >= set(beside):
        return "not run"
    counts = ", ".join(str(num_collapsed(grid[it])) for it in beside)
    of_all = f"{counts} of {len(grid[beside[0]])}"
    also = [it._replace(arm=exact) for it in beside]
    of_exact = f"exact {_collapsed(grid, also, exact)}" if grid.keys() >= set(also) else ""
    return ", ".join(filter(None, (of_all, show_correction(beside[0]), of_exact)))


def _difference(grid: Grid, setting: Setting) -> str:
    """Of mean reward, with an interval where there are several seeds."""
    noqat = _beside(setting, NOQAT)
    if noqat not in grid:
        return "not run"
    first, second = ([run.area for run in grid[it]] for it in (noqat, _beside(noqat, QAT)))
    if len(first) == 1:
        return f"{first[0] - second[0]:+.3f}"
    return show_difference(paired_difference(first, second, AREA_LEVEL))
