"""Claims C1 to C8 of docs/protocols/collapse.md as code: rules over the outcomes of a grid.

The highest learning rate of a study is the protocol's 3e-4, the second highest its 2e-4. A rule
that asks for a setting which the grid lacks raises KeyError with it, and its claim is not judged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from analysis.collapse.grid import (
    BF16,
    CORRECTIONS,
    FFN,
    NOQAT,
    QAT,
    Design,
    Grid,
    Setting,
    num_collapsed,
    show_rate,
)
from analysis.collapse.survival import critical_rate, holm, log_rank, paired_difference
from analysis.stats import Verdict

LEVEL = 0.05
AREA_MARGIN = 0.05
AREA_LEVEL = 0.90


class Difference(NamedTuple):
    """Whether one setting collapses earlier than another.

    Attributes:
        p_value: that decides; of a primary test the corrected one.
        first_is_earlier: direction.
        raw_p_value: before the correction.
    """

    p_value: float
    first_is_earlier: bool
    raw_p_value: float

    @property
    def earlier(self) -> bool:
        """The first is significantly earlier."""
        return self.p_value <= LEVEL and self.first_is_earlier

    @property
    def later(self) -> bool:
        """The first is significantly later."""
        return self.p_value <= LEVEL and not self.first_is_earlier

    def __str__(self) -> str:
        corrected = self.p_value != self.raw_p_value
        return f"{self.raw_p_value:.3f}" + (f", corrected {self.p_value:.3f}" if corrected else "")


Pairs = Mapping[tuple[Setting, Setting], Difference]


class Comparison:
    """A grid with its design and the primary tests.

    Args:
        grid: outcomes of complete cells.
        design: what is compared.
    """

    def __init__(self, grid: Grid, design: Design) -> None:
        self.grid, self.design = grid, design
        self.primary = self._primary_tests()

    def at(self, arm: str, lr: float | None = None) -> Setting:
        """A plain setting of the dense model, by default at the decisive rate."""
        return Setting(self.design.dense, arm, lr or self.design.decisive_lr)

    def difference(self, first: Setting, second: Setting) -> Difference:
        """Between two settings, with the corrected p-value where the test is a primary one."""
        if (first, second) in self.primary:
            return self.primary[first, second]
        test = log_rank(self.grid[first], self.grid[second])
        return Difference(*test, test.p_value)

    def collapsed(self, *settings: Setting) -> str:
        """How many runs of each setting collapsed, in words."""
        counts = (f"{s.arm} {num_collapsed(self.grid[s])} of {len(self.grid[s])}" for s in settings)
        return f"collapsed: {', '.join(counts)}"

    def critical_rates(self, *arms: str) -> dict[str, float]:
        """By arm; 0 where not even the lowest rate is survived."""
        collapsed = {
            arm: {lr: num_collapsed(self.grid[self.at(arm, lr)]) for lr in self.design.lrs}
            for arm in arms
        }
        return {arm: critical_rate(by_rate) or 0.0 for arm, by_rate in collapsed.items()}

    def _primary_tests(self) -> Pairs:
        """The tests behind C1 to C3, corrected together after Holm; those that can be made."""
        pairs = [
            (self.at(NOQAT), self.at(QAT)),
            (self.at(NOQAT), self.at(BF16)),
            (self.at(QAT), self.at(BF16)),
        ]
        for lr in self.design.lrs[-2:-1]:
            pairs.append((self.at(NOQAT, lr), self.at(BF16, lr)))
        pairs = [pair for pair in pairs if all(setting in self.grid for setting in pair)]
        tests = [log_rank(*(self.grid[setting] for setting in pair)) for pair in pairs]
        corrected = holm([test.p_value for test in tests])
        return {
            pair: Difference(p_value, test.first_is_earlier, test.p_value)
            for pair, test, p_value in zip(pairs, tests, corrected, strict=True)
        }


Judged = tuple[Verdict, str]


def _earlier_than_both(runs: Comparison, noqat: Setting) -> Judged:
    """C1's rule: a setting without QAT is earlier than QAT and than BF16 at equal settings."""
    qat, bf16 = (noqat._replace(arm=arm) for arm in (QAT, BF16))
    to_qat, to_bf16 = runs.difference(noqat, qat), runs.difference(noqat, bf16)
    detail = f"{runs.collapsed(noqat, qat, bf16)}; p to QAT {to_qat}; to BF16 {to_bf16}"
    if to_qat.earlier and to_bf16.earlier:
        return "PASS", detail
    return ("FAIL" if to_qat.later or to_bf16.later else "INCONCLUSIVE"), detail


def _lower_critical_rate(runs: Comparison) -> Judged:
    rates = runs.critical_rates(NOQAT, BF16)
    detail = f"no QAT {show_rate(rates[NOQAT])}, BF16 {show_rate(rates[BF16])}"
    if rates[NOQAT] >= rates[BF16]:
        return "FAIL", detail
    tested = [lr for lr in runs.design.lrs[-2:] if lr > rates[NOQAT]]
    tests = {lr: runs.difference(runs.at(NOQAT, lr), runs.at(BF16, lr)) for lr in tested}
    shown = "; ".join(f"p at {show_rate(lr)} {test}" for lr, test in tests.items())
    is_shown = any(test.earlier for test in tests.values())
    return ("PASS" if is_shown else "INCONCLUSIVE"), f"{detail}; {shown}"


def _survives_as_bf16(runs: Comparison) -> Judged:
    rates, lrs = runs.critical_rates(QAT, BF16), runs.design.lrs
    lost = {
        arm: sum(num_collapsed(runs.grid[runs.at(arm, lr)]) for lr in lrs) for arm in (QAT, BF16)
    }
    num_runs = sum(len(runs.grid[runs.at(QAT, lr)]) for lr in lrs)
    detail = (
        f"critical rate: QAT {show_rate(rates[QAT])}, BF16 {show_rate(rates[BF16])}; "
        f"collapsed: QAT {lost[QAT]}, BF16 {lost[BF16]} of {num_runs}"
    )
    if any(runs.difference(runs.at(QAT, lr), runs.at(BF16, lr)).earlier for lr in lrs):
        return "FAIL", detail
    no_worse = rates[QAT] >= rates[BF16] and lost[QAT] <= lost[BF16] + 1
    return ("PASS" if no_worse else "INCONCLUSIVE"), detail


def _costs_no_reward(runs: Comparison) -> Judged:
    verdicts, details = [], []
    for lr in runs.design.lrs[:-1] or runs.design.lrs:
        qat, bf16 = ([o.area for o in runs.grid[runs.at(arm, lr)]] for arm in (QAT, BF16))
        interval = paired_difference(qat, bf16, AREA_LEVEL)
        verdicts.append(interval.judge(-AREA_MARGIN, AREA_MARGIN))
        shown = f"{interval.estimate:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"
        details.append(f"mean reward less BF16's at {show_rate(lr)}: {shown}")
    return _worst(verdicts), "; ".join(details)


def _corrections_between(runs: Comparison) -> Judged:
    verdicts: list[Verdict] = []
    details = []
    for correction, label in CORRECTIONS.items():
        corrected = runs.at(NOQAT)._replace(correction=correction)
        to_none = runs.difference(corrected, runs.at(NOQAT))
        to_qat = runs.difference(corrected, runs.at(QAT))
        if to_none.earlier or to_qat.later:
            verdicts.append("FAIL")
        else:
            verdicts.append("PASS" if to_none.later and to_qat.earlier else "INCONCLUSIVE")
        outcomes = runs.grid[corrected]
        details.append(
            f"{label} {verdicts[-1]}: {num_collapsed(outcomes)} of {len(outcomes)} collapsed, "
            f"p to none {to_none}, to QAT {to_qat}"
        )
    return _worst(verdicts), "; ".join(details)


def _ffn_survives_as_full(runs: Comparison) -> Judged:
    ffn, qat = runs.at(FFN), runs.at(QAT)
    difference = runs.difference(ffn, qat)
    detail = f"{runs.collapsed(ffn, qat)}; p {difference}"
    if difference.earlier:
        return "FAIL", detail
    close = num_collapsed(runs.grid[ffn]) <= num_collapsed(runs.grid[qat]) + 1
    return ("PASS" if close else "INCONCLUSIVE"), detail


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    if "FAIL" in verdicts:
        return "FAIL"
    return "PASS" if set(verdicts) == {"PASS"} else "INCONCLUSIVE"


class Rule(NamedTuple):
    """A claim and how it is judged."""

    statement: str
    judge: Callable[[Comparison], Judged]


def rules_of(design: Design) -> dict[str, Rule]:
    """The claims about a design, by the protocol's names."""
    at = f"at {show_rate(design.decisive_lr)}"
    rules = {
        "C1": Rule(
            f"no QAT collapses earlier than QAT and BF16 {at}",
            lambda runs: _earlier_than_both(runs, runs.at(NOQAT)),
        ),
        "C2": Rule("no QAT has a lower critical rate than BF16", _lower_critical_rate),
        "C3": Rule("QAT survives as long as BF16", _survives_as_bf16),
        "C4": Rule("QAT costs no reward below the highest rate", _costs_no_reward),
        "C5": Rule(f"corrections delay collapse, less than QAT, {at}", _corrections_between),
        "C7": Rule(
            f"C1 with group-centred advantages {at}",
            lambda runs: _earlier_than_both(runs, runs.at(NOQAT)._replace(advantage="group")),
        ),
        "C8": Rule(f"QAT of FFN weights survives as long as full QAT {at}", _ffn_survives_as_full),
    }
    if design.moe is not None:
        moe = design.moe
        rules["C6"] = Rule(
            f"C1 for {moe} {at}",
            lambda runs: _earlier_than_both(runs, runs.at(NOQAT)._replace(model=moe)),
        )
    return dict(sorted(rules.items()))
