"""Figure: where the time of a training step goes, by arm."""

from functools import partial
from itertools import product

from matplotlib.figure import Figure

from analysis.bars import busy_parts, draw_step_times
from analysis.results import Results
from analysis.style import add_legend, arm_style, new_figure
from experiments.study.schema import Study

CAPTION = "Median time of a training step by part, all arms"


def draw(study: Study, results: Results) -> Figure:
    """A panel a model, a bar an arm, its parts one after another."""
    figure, axes = new_figure(
        "Time of a training step by part",
        "Bars: medians of each part over all steps but the first, in which everything is loaded; "
        "of a seed each, then their mean.\nNumber: the same of the whole step, to which the parts' "
        "medians need not add up. Whisker: quartiles of these steps.\n"
        "Other: advantages and waiting; through verl checkpoints too.",
        height_inches=1.62 + 0.42 * len(study.arms),
        ncols=len(study.models),
        sharey=True,
    )
    bars = {
        (model, arm): partial(results.series, model, arm)
        for model, arm in product(study.models, study.arms)
    }
    parts = busy_parts(bars.values())
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
        arms = {arm_style(arm).label: bars[model, arm] for arm in study.arms}
        draw_step_times(panel, arms, parts)
    add_legend(figure, axes[0][0])
    return figure
