"""Figure `costs`: time of a training step and weights of the rollout engine, a bar an arm."""

from functools import partial

from matplotlib.figure import Figure

from analysis.bars import PARTS, Bar, busy_parts, draw_step_times, draw_weights
from analysis.collapse.curves import at_highest_rate
from analysis.collapse.data import GridData, show_arm, style_of
from analysis.collapse.grid import BF16, show_rate
from analysis.results import memory_source
from analysis.style import add_legend, new_figure

CAPTION = "Median time of a training step and weights of the rollout engine, a bar an arm"


def draw(data: GridData) -> Figure:
    """The arms of `curves` at the highest rate, dense model."""
    shown = at_highest_rate(data)
    times = {show_arm(setting): partial(data.series, setting) for setting in shown}
    memories = {setting: data.memory(setting) for setting in shown}
    figure, (panels,) = new_figure(
        f"Costs at learning rate {show_rate(data.lrs[-1])}, {data.design.dense}",
        "Step: median over all steps but the first, of a seed each, then their mean; whisker: "
        "quartiles of these steps.\nRuns shared a machine, not with the same others in every arm "
        "(REPRODUCING.md).\n"
        f"Weights: {memory_source(data.study, memories.values())}. Percentages: change from BF16.",
        height_inches=1.75 + 0.42 * len(shown),
        ncols=2,
        sharey=False,
    )
    is_divided = all(data.records(setting, PARTS[0].key) for setting in shown)
    parts = busy_parts(times.values()) if is_divided else []
    draw_step_times(panels[0], times, parts)
    bars = [Bar(show_arm(setting), style_of(setting).color, it) for setting, it in memories.items()]
    bf16 = next((it for setting, it in memories.items() if setting.arm == BF16), None)
    draw_weights(panels[1], bars, bf16)
    panels[1].tick_params(labelleft=False)
    add_legend(figure, *panels)
    return figure
