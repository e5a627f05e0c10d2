"""Figure: weight memory of the rollout engine by arm, and its prediction from shapes."""

from matplotlib.figure import Figure

from analysis.bars import Bar, draw_weights
from analysis.results import Results, memory_source
from analysis.style import add_legend, arm_style, new_figure
from experiments.study.schema import Study

CAPTION = "Weights that the rollout engine holds or is sent, by arm, measured and predicted"


def draw(study: Study, results: Results) -> Figure:
    """A panel a model: a bar an arm, its size and its share of BF16."""
    source = memory_source(study, (run.memory for run in results.manifests.values()))
    is_held = study.measures_engine
    figure, axes = new_figure(
        "Weight memory of the rollout engine" if is_held else "Weights sent to the rollout engine",
        f"Bars: {source}. Percentages: change from the BF16 arm.",
        height_inches=1.3 + 0.42 * len(study.arms),
        ncols=len(study.models),
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(model)
        bars = [
            Bar(arm_style(arm).label, arm_style(arm).color, results.memory_of(model, arm))
            for arm in study.arms
        ]
        draw_weights(panel, bars, results.memory_of(model, "bf16"))
    add_legend(figure, axes[0][0])
    return figure
