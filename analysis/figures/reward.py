"""Figure: online reward by training step, all arms."""

from matplotlib.figure import Figure

from analysis.metrics import CATALOGUE
from analysis.results import Results
from analysis.style import add_legend, new_figure, plot_over_seeds, seeds_note
from experiments.study.schema import Study
from qat_core.rl.metric_names import REWARD

CAPTION = "Online reward by training step, all arms"


def draw(study: Study, results: Results) -> Figure:
    """One panel a model: mean over seeds and their range."""
    figure, axes = new_figure(
        "Online reward by training step",
        f"{seeds_note(study, results)} Each arm samples in its own "
        "precision:\ncompare arms by the offline accuracy, not by this curve.",
        height_inches=3.7,
        ncols=len(study.models),
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set(title=model)
        plot_over_seeds(panel, study, results, model, REWARD)
    axes[0][0].set_ylabel(CATALOGUE[REWARD].axis_label)
    add_legend(figure, axes[0][0])
    return figure
