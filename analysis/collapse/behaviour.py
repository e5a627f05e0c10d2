"""Figure `behaviour`: what training does besides reward and k3 KL, a column an arm."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.collapse.curves import at_highest_rate, draw_runs, lines_note
from analysis.collapse.data import GridData, show_arm
from analysis.collapse.grid import show_rate
from analysis.style import new_figure
from experiments.rl.metric_names import RESPONSE_TOKENS

CAPTION = "Response length, entropy and rollout_corr/kl by training step, a column an arm"
METRICS = {
    RESPONSE_TOKENS: "response length\n(tokens)",
    "actor/entropy": "policy entropy\n(nats a token)",
    "rollout_corr/kl": "rollout_corr/kl (k1)\n(nats a token)",
}
LINEAR_BELOW = 1e-4  # nats: k1 KL has both signs, and near zero is noise


def draw(data: GridData) -> Figure:
    """The arms of `curves` at the highest rate, dense model."""
    shown = at_highest_rate(data)
    figure, axes = new_figure(
        f"Training by step at learning rate {show_rate(data.lrs[-1])}, {data.design.dense}",
        f"{lines_note(data)}\nrollout_corr/kl: "
        "mean of log q - log p of the sampled tokens,\nq the rollout's probability, p the "
        f"trainer's, as verl's recipe shows it; log axis, linear within {LINEAR_BELOW:g}.",
        height_inches=0.9 + 1.75 * len(METRICS),
        has_legend=False,
        nrows=len(METRICS),
        ncols=len(shown),
        sharex=True,
        sharey="row",
    )
    for column, setting in zip(axes.T, shown, strict=True):
        column[0].set_title(show_arm(setting), fontsize=9.5)
        column[-1].set_xlabel("training step")
        for panel, metric in zip(column, METRICS, strict=True):
            draw_runs(panel, data, setting, metric)
            panel.set_xlim(0, data.study.rl.steps)
            panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    for row, label in zip(axes, METRICS.values(), strict=True):
        row[0].set_ylabel(label)
    axes[-1][0].set_yscale("symlog", linthresh=LINEAR_BELOW)
    # else as far below zero as above it
    lowest = min(panel.dataLim.ymin for panel in axes[-1])
    axes[-1][0].set_ylim(bottom=2 * min(lowest, 0.0) - LINEAR_BELOW / 2)
    for panel in axes.flat:
        panel.minorticks_off()
    return figure
