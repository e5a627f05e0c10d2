"""Figure `reward`: mean reward, differences within a seed, against what C4, C9 and C10 require."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.data import GridData, show_arm, style_of
from analysis.collapse.grid import BF16, NOQAT, QAT, Setting, show_rate
from analysis.collapse.outcomes import heights_in_row
from analysis.collapse.rules import AREA_LEVEL, AREA_MARGIN
from analysis.collapse.survival import paired_difference, show_difference
from analysis.style import FAINT, INK, SHADE, new_figure, write_beside

CAPTION = "Mean reward of all steps, differences within a seed, and what the claims ask of them"
EDGE = 1.25  # the panel goes on beyond the margin by this factor


class Row(NamedTuple):
    """What a claim compares, and where it requires the interval to be; None: on an open side."""

    claim: str
    first: Setting
    second: Setting
    low: float | None
    high: float

    @property
    def label(self) -> str:
        """Both settings, the second without what it has in common with the first."""
        second = show_arm(self.second).removeprefix("NVFP4 ")
        return f"{self.claim}: {show_arm(self.first)}\nless {second}"


def rows_of(data: GridData) -> list[Row]:
    """The rows whose runs are complete, at the highest rate."""
    noqat, qat, bf16 = (data.design.plain(arm, data.lrs[-1]) for arm in (NOQAT, QAT, BF16))
    tis = noqat._replace(correction="token_tis")
    rows = [
        Row("C9", noqat, qat, None, -AREA_MARGIN),
        Row("C10", tis, qat, None, -AREA_MARGIN),
        Row("C4", qat, bf16, -AREA_MARGIN, AREA_MARGIN),
    ]
    return [row for row in rows if {row.first, row.second} <= data.grid.keys()]


def draw(data: GridData) -> Figure:
    """A row a comparison: a mark a seed, their mean with its interval."""
    rows = rows_of(data)
    figure, axes = new_figure(
        f"Mean reward of {data.study.rl.steps} steps at {show_rate(data.lrs[-1])}, "
        f"{data.design.dense}",
        f"Small: seeds. Large: their mean, with its {100 * AREA_LEVEL:g} % interval, also in "
        "numbers. Shaded: where the claim asks the whole interval to be.",
        height_inches=1.35 + 0.62 * len(rows),
        has_legend=False,
    )
    panel = axes[0][0]
    panel.axvline(0, color=FAINT, linewidth=1)
    for y, row in enumerate(rows):
        _draw_row(panel, data, row, y)
    left, right = panel.get_xlim()
    left, right = min(left, -EDGE * AREA_MARGIN), max(right, EDGE * AREA_MARGIN)
    for y, row in enumerate(rows):
        low = left if row.low is None else row.low
        panel.barh(y, row.high - low, left=low, height=0.9, color=SHADE, linewidth=0, zorder=0)
    panel.set_yticks(range(len(rows)), [row.label for row in rows])
    panel.set(xlabel="difference of mean reward", xlim=(left, right), ylim=(len(rows) - 0.5, -0.5))
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="y", visible=False)
    return figure


def _draw_row(panel: Axes, data: GridData, row: Row, y: int) -> None:
    first, second = ([run.area for run in data.grid[it]] for it in (row.first, row.second))
    interval, style = paired_difference(first, second, AREA_LEVEL), style_of(row.first)
    seeds_S = np.subtract(first, second)
    heights = heights_in_row(y, len(seeds_S))
    panel.plot(seeds_S, heights, style.marker, color=style.color, markersize=4, fillstyle="none")
    assert interval.low is not None and interval.high is not None
    panel.hlines(y, interval.low, interval.high, color=INK, linewidth=1.6)
    panel.plot(interval.estimate, y, style.marker, color=style.color, mec=INK, markersize=8)
    write_beside(panel, show_difference(interval), y)
