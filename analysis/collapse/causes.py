"""Figure `causes`: what was measured before any run collapsed, by arm and seed.

All arms are read over the same steps: those before the window in which the first run of the three
arms is found to have collapsed. A quantity that explains the collapse has to set the arm that
collapses apart there already; what changes only later may be its consequence.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.collapse.data import GridData
from analysis.collapse.grid import BF16, NOQAT, QAT, Setting, show_rate
from analysis.collapse.survival import WINDOW
from analysis.results import Array
from analysis.style import arm_style, new_figure
from experiments.rl.metric_names import K3_KL, RESPONSE_TOKENS, REWARD

ARMS = (BF16, NOQAT, QAT)
Series = Callable[[str], Array]  # of a metric, (seeds, steps)


class Quantity(NamedTuple):
    """One panel: its label and how its value by seed and step is read."""

    label: str
    read: Callable[[Series], Array]
    is_log: bool = False


ADVANTAGE, SCORE = "drift_term/advantage", "drift_term/score"
WEIGHTS = "drift_term/weight_steps"
QUANTITIES: tuple[Quantity, ...] = (
    Quantity("k3 KL\n(nats, token mean)", lambda of: of(K3_KL), is_log=True),
    Quantity("size of E_q[s]\n(rms norm of q - p)", lambda of: of(SCORE), is_log=True),
    Quantity(
        "drift term, mean\nsize of E_q[A] E_q[s]",
        lambda of: np.abs(of(ADVANTAGE) * of(SCORE)),
        is_log=True,
    ),
    Quantity("E_q[A]\n(mean over tokens)", lambda of: of(ADVANTAGE)),
    Quantity("online reward\n(mean over responses)", lambda of: of(REWARD)),
    Quantity("entropy\n(nats, token mean)", lambda of: of("actor/entropy")),
    Quantity("response length\n(tokens)", lambda of: of(RESPONSE_TOKENS)),
    Quantity("weight drift at the end\n(NVFP4 steps)", lambda of: of(WEIGHTS)[:, -1:]),
)


def steps_before(data: GridData, lr: float) -> int:
    """Steps before the window in which the first run of the arms collapses; all if none does."""
    settings = [data.design.plain(arm, lr) for arm in ARMS]
    outcomes = [it for setting in settings for it in data.grid.get(setting, ())]
    times = [it.collapsed for it in outcomes if it.collapsed is not None]
    return max(1, min(times) - WINDOW) if times else data.study.rl.steps


def means(data: GridData, setting: Setting, num_steps: int) -> Mapping[str, Array]:
    """Of each quantity the mean over the first steps by seed, (seeds,)."""

    def series(metric: str) -> Array:
        return data.series(setting, metric)[:, :num_steps]

    return {quantity.label: quantity.read(series).mean(axis=1) for quantity in QUANTITIES}


def draw(data: GridData) -> Figure:
    """All quantities at the second highest rate, at which arms differ in whether they collapse."""
    lr = data.design.lrs[-2:][0]
    num_steps = steps_before(data, lr)
    figure, axes = new_figure(
        f"Before the first collapse: {data.design.dense} at learning rate {show_rate(lr)}",
        f"Means over steps 1 to {num_steps}, a mark a seed. Filled: collapses later; open: does "
        "not. q: rollout policy, p: trained policy,\nA: advantage, s: gradient of log p. Weight "
        f"drift: after step {num_steps}, NVFP4 steps are half a block scale of the base weights.",
        height_inches=4.76,
        has_legend=False,
        nrows=2,
        ncols=4,
    )
    for position, arm in enumerate(ARMS):
        setting = data.design.plain(arm, lr)
        if setting not in data.grid:
            continue
        values = means(data, setting, num_steps)
        collapses = np.array([it.collapsed is not None for it in data.grid[setting]])
        for panel, quantity in zip(axes.flat, QUANTITIES, strict=True):
            _draw_marks(panel, arm, position, values[quantity.label], collapses)
    for panel, quantity in zip(axes.flat, QUANTITIES, strict=True):
        panel.set_ylabel(quantity.label)
        panel.set_xticks(range(len(ARMS)), ["BF16", "no QAT", "QAT"])
        panel.set_xlim(-0.5, len(ARMS) - 0.5)
        _show_whole_scale(panel, quantity.is_log)
    return figure


def _show_whole_scale(panel: Axes, is_log: bool) -> None:
    """Whole decades, or a linear axis from zero, so that noise does not fill a panel."""
    low, high = panel.dataLim.intervaly
    if is_log:
        first = np.floor(np.log10(panel.dataLim.minposy / 1.2))
        last = np.ceil(np.log10(high * 1.2))
        panel.set(yscale="log", ylim=(10**first, 10**last))
    else:
        panel.set_ylim(min(0.0, 1.1 * low), 1.1 * max(0.0, high))
    panel.minorticks_off()


def _draw_marks(panel: Axes, arm: str, position: int, values: Array, collapses: Array) -> None:
    style = arm_style(arm)
    x = position + np.linspace(-0.3, 0.3, len(values))
    for its, fill in ((collapses, "full"), (~collapses, "none")):
        panel.plot(x[its], values[its], style.marker, color=style.color, ms=6, fillstyle=fill)
