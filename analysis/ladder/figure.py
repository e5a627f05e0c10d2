"""The effects of a ladder by size."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from analysis.collapse.rules import AREA_MARGIN
from analysis.collapse.survival import show_difference
from analysis.ladder.rungs import EFFECTS, Rung, slopes
from analysis.stats import LEVEL, over_seeds
from analysis.style import FAINT, SHADE, arm_style, new_figure


def draw(rungs: Sequence[Rung]) -> Figure:
    """A panel an effect: seeds, mean and interval of each size, and the fitted line."""
    figure, axes = new_figure(
        "What rounding rollouts costs, by size of the model",
        f"Mean reward over all steps, differences within a seed. Dots: seeds; marks: mean and its "
        f"{LEVEL:.0%} interval; line: least squares over seeds.\nIn titles the change a tenfold "
        f"size and its interval. Shaded: the margin of {AREA_MARGIN:g}.",
        height_inches=3.6,
        has_legend=False,
        ncols=len(EFFECTS),
        sharey=True,
    )
    size_K = np.log10([it.num_parameters for it in rungs])
    seeds_K = [len(it.data.study.seeds) for it in rungs]
    for panel, (name, (arm, _)), slope in zip(
        axes[0], EFFECTS.items(), slopes(rungs).values(), strict=True
    ):
        color = arm_style(arm).color
        panel.axhspan(-AREA_MARGIN, AREA_MARGIN, color=SHADE, zorder=0)
        for rung in rungs:
            effects_S = rung.effects[name]
            mean = over_seeds(effects_S)
            assert mean.low is not None and mean.high is not None
            panel.plot([rung.num_parameters] * len(effects_S), effects_S, ".", color=FAINT)
            reach = [[mean.estimate - mean.low], [mean.high - mean.estimate]]
            panel.errorbar(
                rung.num_parameters, mean.estimate, reach, fmt="o", capsize=4, color=color
            )
        means_K = [it.effects[name].mean() for it in rungs]
        height = np.average(means_K, weights=seeds_K)
        line_K = height + slope.estimate * (size_K - np.average(size_K, weights=seeds_K))
        panel.plot(10**size_K, line_K, color=color, linewidth=1)
        panel.set(xscale="log", xlabel="parameters", title=f"{name}: {show_difference(slope)}")
        panel.set_xticks(10**size_K, [f"{it.num_parameters / 1e6:.0f}M" for it in rungs])
        panel.minorticks_off()
    axes[0][0].set_ylabel("difference of mean reward")
    return figure
