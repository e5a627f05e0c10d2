"""Judges the study `collapse`: `python -m analysis.collapse --study FILE --results DIR --out DIR`.

docs/protocols/collapse.md has the claims and their decision rules; here they are code. Only cells
that have all their runs are judged.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from analysis.collapse_grid import (
    BF16,
    DENSE,
    FFN,
    MOE,
    NOQAT,
    QAT,
    Grid,
    Setting,
    num_collapsed,
    read_grid,
    table_rows,
)
from analysis.stats import Verdict
from analysis.survival import (
    critical_rate,
    holm,
    log_rank,
    paired_difference,
)
from experiments.study.load import load_study
from experiments.support.cli import STUDY, run_cli
from experiments.support.json_files import write_json

LEVEL = 0.05
AREA_MARGIN = 0.05
AREA_LEVEL = 0.90
DECISIVE_LR = 3e-4
QUALITY_LRS = (1e-4, 2e-4)


class Judgement(BaseModel):
    """One claim of the protocol.

    Attributes:
        name: C1 to C8.
        statement: what is claimed.
        verdict: None where a cell that it needs is not complete.
        detail: the numbers behind it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    statement: str
    verdict: Verdict | None
    detail: str


def judge_grid(grid: Grid) -> list[Judgement]:
    """All claims, those that lack a cell without a verdict."""
    primary = _primary_tests(grid)
    judged = []
    for name, (statement, judge) in CLAIMS.items():
        try:
            verdict, detail = judge(grid, primary)
        except KeyError as error:
            verdict, detail = None, f"not complete: {' '.join(map(str, error.args[0]))}"
        judged.append(Judgement(name=name, statement=statement, verdict=verdict, detail=detail))
    return judged


class Difference(NamedTuple):
    """Whether one setting collapses earlier than another, with its corrected p-value."""

    p_value: float
    first_is_earlier: bool

    @property
    def earlier(self) -> bool:
        """The first is significantly earlier."""
        return self.p_value <= LEVEL and self.first_is_earlier

    @property
    def later(self) -> bool:
        """The first is significantly later."""
        return self.p_value <= LEVEL and not self.first_is_earlier


Pairs = Mapping[tuple[Setting, Setting], Difference]


def _compare(grid: Grid, first: Setting, second: Setting) -> Difference:
    return Difference(*log_rank(grid[first], grid[second]))


def _primary_tests(grid: Grid) -> Pairs:
    """The four tests behind C1 to C3, corrected together after Holm; those that can be made."""
    noqat, qat, bf16 = (Setting(DENSE, arm, DECISIVE_LR) for arm in (NOQAT, QAT, BF16))
    lower = {arm: Setting(DENSE, arm, 2e-4) for arm in (NOQAT, BF16)}
    wanted = [(noqat, qat), (noqat, bf16), (qat, bf16), (lower[NOQAT], lower[BF16])]
    pairs = [pair for pair in wanted if all(setting in grid for setting in pair)]
    tests = [_compare(grid, *pair) for pair in pairs]
    corrected = holm([test.p_value for test in tests])
    return {
        pair: Difference(p_value, test.first_is_earlier)
        for pair, test, p_value in zip(pairs, tests, corrected, strict=True)
    }


def _earlier_than_both(
    grid: Grid, tests: Pairs, model: str, advantage: str = "reward"
) -> tuple[Verdict, str]:
    """C1's rule: no QAT is earlier than QAT and than BF16."""
    noqat, qat, bf16 = (
        Setting(model, arm, DECISIVE_LR, advantage=advantage) for arm in (NOQAT, QAT, BF16)
    )
    pairs = [(noqat, qat), (noqat, bf16)]
    found = [tests.get(pair) or _compare(grid, *pair) for pair in pairs]
    detail = f"{_show(grid, noqat, qat, bf16)}; p {', '.join(f'{it.p_value:.3g}' for it in found)}"
    if all(it.earlier for it in found):
        return "PASS", detail
    return ("FAIL" if any(it.later for it in found) else "INCONCLUSIVE"), detail


def _critical_rates(grid: Grid, arms: Sequence[str]) -> dict[str, float]:
    """By arm; 0 where not even the lowest rate is survived."""
    rates = {}
    for arm in arms:
        dense = {s.lr: o for s, o in grid.items() if s == Setting(DENSE, arm, s.lr)}
        if set(dense) != {*QUALITY_LRS, DECISIVE_LR}:
            raise KeyError((DENSE, arm, "at all rates"))
        collapsed = {lr: num_collapsed(outcomes) for lr, outcomes in dense.items()}
        rates[arm] = critical_rate(collapsed) or 0.0
    return rates


def _c2(grid: Grid, tests: Pairs) -> tuple[Verdict, str]:
    rates = _critical_rates(grid, (NOQAT, BF16))
    detail = f"no QAT {rates[NOQAT]:g}, BF16 {rates[BF16]:g}"
    if rates[NOQAT] >= rates[BF16]:
        return "FAIL", detail
    above = [lr for lr in (2e-4, DECISIVE_LR) if lr > rates[NOQAT]]
    pairs = [(Setting(DENSE, NOQAT, lr), Setting(DENSE, BF16, lr)) for lr in above]
    return ("PASS" if any(tests[pair].earlier for pair in pairs) else "INCONCLUSIVE"), detail


def _c3(grid: Grid, tests: Pairs) -> tuple[Verdict, str]:
    rates = _critical_rates(grid, (QAT, BF16))
    lrs = (*QUALITY_LRS, DECISIVE_LR)
    lost = {
        arm: sum(num_collapsed(grid[Setting(DENSE, arm, lr)]) for lr in lrs) for arm in (QAT, BF16)
    }
    detail = (
        f"critical rate: QAT {rates[QAT]:g}, BF16 {rates[BF16]:g}; "
        f"collapsed: QAT {lost[QAT]}, BF16 {lost[BF16]} of {3 * len(next(iter(grid.values())))}"
    )
    for lr in lrs:
        pair = Setting(DENSE, QAT, lr), Setting(DENSE, BF16, lr)
        if (tests.get(pair) or _compare(grid, *pair)).earlier:
            return "FAIL", detail
    no_worse = rates[QAT] >= rates[BF16] and lost[QAT] <= lost[BF16] + 1
    return ("PASS" if no_worse else "INCONCLUSIVE"), detail


def _c4(grid: Grid, tests: Pairs) -> tuple[Verdict, str]:
    verdicts, details = [], []
    for lr in QUALITY_LRS:
        qat, bf16 = ([o.area for o in grid[Setting(DENSE, arm, lr)]] for arm in (QAT, BF16))
        interval = paired_difference(qat, bf16, AREA_LEVEL)
        verdicts.append(interval.judge(-AREA_MARGIN, AREA_MARGIN))
        details.append(
            f"at {lr:g}: {interval.estimate:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
        )
    return _worst(verdicts), "; ".join(details)


def _c5(grid: Grid, tests: Pairs) -> tuple[Verdict, str]:
    none, qat = (Setting(DENSE, arm, DECISIVE_LR) for arm in (NOQAT, QAT))
    verdicts: list[Verdict] = []
    details = []
    for correction in ("token_tis", "sequence_mask", "score_centering"):
        corrected = Setting(DENSE, NOQAT, DECISIVE_LR, correction)
        to_none, to_qat = _compare(grid, corrected, none), _compare(grid, corrected, qat)
        if to_none.earlier or to_qat.later:
            verdict: Verdict = "FAIL"
        else:
            verdict = "PASS" if to_none.later and to_qat.earlier else "INCONCLUSIVE"
        verdicts.append(verdict)
        details.append(
            f"{correction} {verdict}: {num_collapsed(grid[corrected])} collapsed, "
            f"p {to_none.p_value:.3g} to none, {to_qat.p_value:.3g} to QAT"
        )
    return _worst(verdicts), "; ".join(details)


def _c8(grid: Grid, tests: Pairs) -> tuple[Verdict, str]:
    ffn, qat = (Setting(DENSE, arm, DECISIVE_LR) for arm in (FFN, QAT))
    difference = _compare(grid, ffn, qat)
    detail = f"{_show(grid, ffn, qat)}; p {difference.p_value:.3g}"
    if difference.earlier:
        return "FAIL", detail
    close = num_collapsed(grid[ffn]) <= num_collapsed(grid[qat]) + 1
    return ("PASS" if close else "INCONCLUSIVE"), detail


Judge = Callable[[Grid, Pairs], tuple[Verdict, str]]
CLAIMS: Mapping[str, tuple[str, Judge]] = {
    "C1": (
        "dense, 3e-4: no QAT collapses earlier than QAT and BF16",
        lambda grid, tests: _earlier_than_both(grid, tests, DENSE),
    ),
    "C2": ("no QAT has a lower critical rate than BF16", _c2),
    "C3": ("QAT survives as long as BF16", _c3),
    "C4": ("QAT costs no reward", _c4),
    "C5": ("corrections delay collapse, less than QAT", _c5),
    "C6": ("MoE, 3e-4: as C1", lambda grid, tests: _earlier_than_both(grid, tests, MOE)),
    "C7": (
        "dense, 3e-4, group-centred advantages: as C1",
        lambda grid, tests: _earlier_than_both(grid, tests, DENSE, "group"),
    ),
    "C8": ("QAT of feed-forward weights survives as long as full QAT", _c8),
}


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    if "FAIL" in verdicts:
        return "FAIL"
    return "PASS" if set(verdicts) == {"PASS"} else "INCONCLUSIVE"


def _show(grid: Grid, *settings: Setting) -> str:
    shown = (f"{s.arm} {num_collapsed(grid[s])} of {len(grid[s])}" for s in settings)
    return f"collapsed: {', '.join(shown)}"


def main() -> None:
    """Writes claims.json and claims.md, and prints the latter."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY])
    parser.add_argument("--results", type=Path, required=True, help="results or records folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of claims.json, claims.md")
    arguments = parser.parse_args()
    grid = read_grid(load_study(arguments.study), arguments.results)
    judged = judge_grid(grid)
    lines = ["| claim | | verdict | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {j.name} | {j.statement} | {j.verdict or 'not run'} | {j.detail} |" for j in judged
    ]
    text = "\n".join([*lines, "", *table_rows(grid)]) + "\n"
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "claims.json", [j.model_dump() for j in judged])
    (arguments.out / "claims.md").write_text(text)
    print(text)


if __name__ == "__main__":
    run_cli(main)
