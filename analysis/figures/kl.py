"""Figure: mismatch of rollout and trainer (k3 KL) by training step, each arm against BF16."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.claims_table import show_ratio
from analysis.parity.kl import kl_ratio, mean_kl
from analysis.results import Array, Results
from analysis.stats import SPIKE, Interval, geometric_mean
from analysis.style import INK, add_legend, arm_style, grid_by_model, plot_seeds, seeds_note
from experiments.rl.metric_names import K3_KL
from experiments.study.schema import Study

RATIO_NOTE = (
    "\nDash-dotted: mean over a run's tokens, of the steps that both arms did; over seeds the "
    "geometric mean. Ratio: of a seed's\ntwo means; over several seeds the geometric mean, with "
    "its 95 % interval: one dash-dotted line over the other."
)
ROW_INCHES = 1.75
MANY_STEPS = 60  # lines of more steps cover each other, and are drawn faint


def draw(study: Study, results: Results) -> Figure:
    """A column a model, a row an arm with BF16's runs behind it, and the arm's ratio to BF16."""
    others = tuple(arm for arm in study.arms if arm != "bf16") or study.arms
    figure, axes = grid_by_model(
        study,
        "Mismatch of rollout and trainer, KL(rollout || train)",
        f"{seeds_note(study, results)} Gap: overflow. Circles: steps above {SPIKE:.0f} times "
        f"their run's median.{RATIO_NOTE if 'bf16' in study.arms else ''}",
        height_inches=1.36 + ROW_INCHES * len(others),
        row_labels=["k3 KL\n(nats a token)"] * len(others),
        sharey=True,
    )
    drawn = []
    for row, arm in zip(axes, others, strict=True):
        for panel, model in zip(row, study.models, strict=True):
            drawn += _draw_panel(panel, study, results, model, arm)
    values = np.concatenate([values_ST.ravel() for values_ST in drawn])
    if (values == 0).any():
        _show_zero(axes.ravel(), values[values > 0])
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.set_title(f"{model}\n{panel.get_title(loc='left')}", loc="left", fontsize=9.5)
    _legend_of_all(figure, axes[0][0], study)
    return figure


def _draw_panel(panel: Axes, study: Study, results: Results, model: str, arm: str) -> list[Array]:
    """Returns what was drawn, (seeds, steps) of each arm."""
    panel.set_yscale("log")
    all_values = []
    for drawn in dict.fromkeys(("bf16", arm) if "bf16" in study.arms else (arm,)):
        is_faint, width = study.rl.steps > MANY_STEPS, 1.3 if drawn == arm else 0.9
        line = {"lw": 0.6, "alpha": 0.5} if is_faint else {"lw": width}
        values_ST = plot_seeds(panel, study, results, model, drawn, K3_KL, **line)
        _circle_spikes(panel, results.steps(model, drawn), values_ST, arm_style(drawn).color)
        all_values.append(values_ST)
    title = arm_style(arm).label
    if "bf16" in study.arms:
        means = mean_kl(results, model, arm)
        for mean_S, drawn in zip(means, (arm, "bf16"), strict=True):
            color = INK if drawn == "bf16" else arm_style(drawn).color
            if np.isfinite(mean_S).all() and mean_S.all():
                panel.axhline(geometric_mean(mean_S), color=color, linestyle="-.", linewidth=1.2)
        title = f"{title}: {_shown(kl_ratio(results, model, arm))}"
    if not all_values[-1].any():
        title = f"{arm_style(arm).label}: exactly 0 at every step"
    panel.set_title(title, loc="left", fontsize=9.5)
    panel.minorticks_off()
    return all_values


def _show_zero(panels: Sequence[Axes], positive: Array) -> None:
    """A log axis that ends in a linear piece with 0, of an exact arm, in place of one without."""
    least = 10.0 ** np.floor(np.log10(positive.min())) if positive.size else 1.0
    for panel in panels:
        panel.set_yscale("symlog", linthresh=least, linscale=0.5)
        panel.set_ylim(bottom=-least / 4)
        panel.minorticks_off()


def _shown(interval: Interval | None) -> str:
    if interval is None:
        return "no ratio"
    text = f"{show_ratio(interval.estimate)} BF16"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} ({show_ratio(interval.low)} to {show_ratio(interval.high)})"


def _circle_spikes(panel: Axes, steps_T: Array, values_ST: Array, color: str) -> None:
    with np.errstate(invalid="ignore"):
        is_spike_ST = values_ST > SPIKE * np.nanmedian(values_ST, axis=1, keepdims=True)
    for values_T, is_spike_T in zip(values_ST, is_spike_ST, strict=True):
        panel.plot(steps_T[is_spike_T], values_T[is_spike_T], "o", color=color, mfc="none", ms=6)


def _legend_of_all(figure: Figure, axes: Axes, study: Study) -> None:
    for arm in study.arms:
        style = arm_style(arm)
        axes.plot([], [], **style.line, label=style.label)
    add_legend(figure, axes)
