"""Comparisons of a grid's settings by survival, those behind the primary claims corrected."""

from collections.abc import Mapping
from typing import NamedTuple

from analysis.collapse.grid import BF16, NOQAT, QAT, Design, Grid, Setting, num_collapsed
from analysis.collapse.survival import critical_rate, holm, log_rank
from experiments.study.protocol import COLLAPSE

LEVEL = COLLAPSE.error_rate


class Difference(NamedTuple):
    """Whether one setting collapses earlier than another."""

    p_value: float  # that decides; of a primary test the corrected one
    first_is_earlier: bool  # direction
    raw_p_value: float  # before the correction

    @property
    def earlier(self) -> bool:
        """The first is significantly earlier."""
        return self.p_value <= LEVEL and self.first_is_earlier

    @property
    def later(self) -> bool:
        """The first is significantly later."""
        return self.p_value <= LEVEL and not self.first_is_earlier

    def __str__(self) -> str:
        shown = show_p(self.raw_p_value)
        corrected = self.p_value != self.raw_p_value
        return f"{shown}, corrected {show_p(self.p_value)}" if corrected else shown


def show_p(p_value: float) -> str:
    """A p-value with the digits that matter."""
    return f"{p_value:.3f}" if p_value >= 0.001 else f"{p_value:.0e}"


Pairs = Mapping[tuple[Setting, Setting], Difference]


class Comparison:
    """A grid with its design and the primary tests."""

    def __init__(self, grid: Grid, design: Design) -> None:
        self.grid, self.design = grid, design
        self.primary = self._primary_tests()

    def at(self, arm: str, lr: float | None = None) -> Setting:
        """A plain setting of the dense model, by default at the decisive rate."""
        return self.design.plain(arm, lr or self.design.decisive_lr)

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
        """The tests behind C1 to C3 that can be made, corrected for all that are planned."""
        pairs = [
            (self.at(NOQAT), self.at(QAT)),
            (self.at(NOQAT), self.at(BF16)),
            (self.at(QAT), self.at(BF16)),
        ]
        for lr in self.design.lrs[-2:-1]:
            pairs.append((self.at(NOQAT, lr), self.at(BF16, lr)))
        num_planned = sum(self.design.settings.issuperset(pair) for pair in pairs)
        pairs = [pair for pair in pairs if all(setting in self.grid for setting in pair)]
        tests = [log_rank(*(self.grid[setting] for setting in pair)) for pair in pairs]
        corrected = holm([test.p_value for test in tests], num_planned)
        return {
            pair: Difference(p_value, test.first_is_earlier, test.p_value)
            for pair, test, p_value in zip(pairs, tests, corrected, strict=True)
        }
