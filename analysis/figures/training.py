"""Figure: what training does besides the mismatch: reward, response length, entropy, k1 KL."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.metrics import CATALOGUE
from analysis.results import Results
from analysis.style import add_legend, arm_style, grid_by_model, plot_seeds, seeds_note
from experiments.rl.metric_names import REWARD
from experiments.study.schema import Study

METRICS = {
    REWARD: "online reward\n(mean of responses)",
    "response_length/mean": "response length\n(tokens)",
    "actor/entropy": "policy entropy\n(nats a token)",
    "rollout_corr/kl": "rollout_corr/kl (k1)\n(nats a token)",
}
ROW_INCHES = 1.55


def draw(study: Study, results: Results) -> Figure:
    """A column a model, a row a metric that the runs recorded."""
    recorded = [key for key in METRICS if key in results.metrics]
    assert set(METRICS) <= set(CATALOGUE)
    thick = " Thick: their mean." if len(study.seeds) > 1 else ""
    figure, axes = grid_by_model(
        study,
        "Training by step",
        f"{seeds_note(study, results)}{thick} Each arm samples in its own precision: compare arms "
        "by offline accuracy,\nnot by online reward. rollout_corr/kl: mean of log q - log p of the "
        "sampled tokens, q the rollout's probability, p the trainer's, as\nverl's recipe shows it; "
        "the figure of k3 KL has a log axis.",
        height_inches=1.36 + ROW_INCHES * len(recorded),
        row_labels=[METRICS[key] for key in recorded],
        sharey="row",
    )
    for row, key in zip(axes, recorded, strict=True):
        for panel, model in zip(row, study.models, strict=True):
            _draw_panel(panel, study, results, model, key)
    add_legend(figure, axes[0][0])
    return figure


def _draw_panel(panel: Axes, study: Study, results: Results, model: str, key: str) -> None:
    for arm in study.arms:
        style, steps_T = arm_style(arm), results.steps(model, arm)
        values_ST = plot_seeds(panel, study, results, model, arm, key, lw=0.6, alpha=0.6)
        every = max(1, len(steps_T) // 5)
        look = {**style.line, "lw": 1.8, "marker": style.marker, "ms": 5, "label": style.label}
        first = study.arms.index(arm) % every
        panel.plot(steps_T, values_ST.mean(0), markevery=(first, every), **look)
    panel.locator_params(axis="y", min_n_ticks=3)
