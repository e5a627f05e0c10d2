"""Figure: offline accuracy after training, differences of arms within a seed against the margin."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.accuracy_claims import BF16, PRECISIONS, Served, difference
from analysis.results import Results
from analysis.style import FAINT, INK, SHADE, arm_style, new_figure
from experiments.study.schema import Study

CAPTION = "Offline accuracy of every arm less BF16's in log-odds, in BF16 and in NVFP4, by seed"
ROW_INCHES = 0.42


def draw(study: Study, results: Results) -> Figure:
    """A panel a model, a row an arm and precision: seeds, their mean and its interval."""
    rows = [
        Served(arm, precision)
        for arm in study.arms
        for precision in PRECISIONS
        if Served(arm, precision) != BF16
    ]
    margin = study.claims.accuracy_log_odds
    figure, axes = new_figure(
        "Offline accuracy after training, less BF16's evaluated in BF16",
        "Small dots: seeds; large: their mean, with its 95 % interval over seeds where there are "
        f"several. Shaded: the margin of {margin} in log-odds.\nAt the right: mean accuracy of "
        "sampled answers after the last step that both arms did. Filled: evaluated in BF16; open: "
        "in NVFP4.",
        height_inches=1.5 + ROW_INCHES * len(rows),
        has_legend=False,
        ncols=len(study.models),
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        panel.axvspan(-margin, margin, color=SHADE, linewidth=0)
        panel.axvline(0, color=FAINT, linewidth=1)
        for position, served in enumerate(rows):
            _draw_row(panel, study, results, model, served, -position)
        last = results.last_evaluated(model, "bf16")
        reference_SP, samples = results.correct_answers(model, "bf16", last, "bf16")
        panel.set_title(f"{model}: BF16 {reference_SP.mean() / samples:.3f}")
        panel.set_xlabel("difference (log-odds)")
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", visible=False)
    axes[0][0].set_yticks(
        [-position for position in range(len(rows))],
        [f"{arm_style(it.arm).label}, in {PRECISIONS[it.precision]}" for it in rows],
    )
    return figure


def _draw_row(
    panel: Axes, study: Study, results: Results, model: str, served: Served, height: float
) -> None:
    step = results.last_evaluated(model, served.arm, "bf16")
    found, style = difference(results, model, step, served, BF16), arm_style(served.arm)
    fill = style.color if served.precision == "bf16" else "white"
    panel.plot(found.seeds_S, [height] * len(found.seeds_S), ".", color=style.color, ms=5)
    if found.interval.low is not None and found.interval.high is not None:
        panel.plot([found.interval.low, found.interval.high], [height] * 2, color=style.color, lw=2)
    panel.plot(
        found.interval.estimate, height, style.marker, color=style.color, markerfacecolor=fill, ms=8
    )
    panel.annotate(
        f"{found.arm_S.mean():.3f}{'' if step == study.rl.steps else f', step {step}'}",
        xy=(1.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
    )
