"""Figure: offline accuracy after training, differences of arms within a seed against the margin.

A study without the BF16 arm has no difference to draw: its arms' own log-odds are drawn instead.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.accuracy_claims import BF16, PRECISIONS, Served, answers, difference
from analysis.results import Array, Results
from analysis.stats import Interval, log_odds, over_seeds
from analysis.style import FAINT, INK, SHADE, arm_style, new_figure
from experiments.study.schema import Study

CAPTION = "Offline accuracy of every arm and seed in log-odds, evaluated in BF16 and in NVFP4"
ROW_INCHES = 0.42


def draw(study: Study, results: Results) -> Figure:
    """A panel a model, a row an arm and precision: seeds, their mean and its interval."""
    has_control = BF16.arm in study.arms
    rows = [
        Served(arm, precision)
        for arm in study.arms
        for precision in PRECISIONS
        if Served(arm, precision) != BF16
    ]
    margin = study.claims.accuracy_log_odds
    shaded = f" Shaded: the margin of {margin} in log-odds." if has_control else ""
    step_of = "that both arms did" if has_control else "that all seeds did"
    figure, axes = new_figure(
        "Offline accuracy after training"
        + (", less BF16's evaluated in BF16" if has_control else ""),
        "A row: an arm, and the precision that its checkpoint is evaluated in (filled: BF16, open: "
        f"NVFP4), after the last step {step_of}.\nSmall dots: seeds; large: their mean, with its "
        f"95 % interval where there are several.{shaded}\nAccuracy: share of right sampled "
        "answers, mean of the seeds.",
        height_inches=1.66 + ROW_INCHES * len(rows),
        has_legend=False,
        ncols=len(study.models),
        sharex=True,
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        if has_control:
            panel.axvspan(-margin, margin, color=SHADE, linewidth=0)
            panel.axvline(0, color=FAINT, linewidth=1)
        for position, served in enumerate(rows):
            _draw_row(panel, study, results, model, served, -position)
        panel.set_title(f"{model}{_control_accuracy(results, model) if has_control else ''}")
        panel.set_xlabel(f"{'difference' if has_control else 'accuracy'} (log-odds), right: better")
        _write_beside(panel, "accuracy", 0.6)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", visible=False)
    axes[0][0].set_yticks(
        [-position for position in range(len(rows))],
        [f"{arm_style(it.arm).label}, in {PRECISIONS[it.precision]}" for it in rows],
    )
    return figure


def _control_accuracy(results: Results, model: str) -> str:
    correct_S, num_answers = answers(results, model, BF16, results.last_evaluated(model, BF16.arm))
    return f": BF16 {correct_S.mean() / num_answers:.3f}"


def _values(
    study: Study, results: Results, model: str, served: Served
) -> tuple[int, Array, Interval, float]:
    """The step shown, what a row shows by seed and over seeds, and the mean accuracy."""
    if BF16.arm in study.arms:
        step = results.last_evaluated(model, served.arm, BF16.arm)
        found = difference(results, model, step, served, BF16)
        return step, found.seeds_S, found.interval, float(found.arm_S.mean())
    step = results.last_evaluated(model, served.arm)
    correct_S, num_answers = answers(results, model, served, step)
    values_S = log_odds(correct_S, num_answers)
    return step, values_S, over_seeds(values_S), float(correct_S.mean() / num_answers)


def _draw_row(
    panel: Axes, study: Study, results: Results, model: str, served: Served, height: float
) -> None:
    step, values_S, interval, accuracy = _values(study, results, model, served)
    style = arm_style(served.arm)
    fill = style.color if served.precision == "bf16" else "white"
    panel.plot(values_S, [height] * len(values_S), ".", color=style.color, ms=5)
    if interval.low is not None and interval.high is not None:
        panel.plot([interval.low, interval.high], [height] * 2, color=style.color, lw=2)
    panel.plot(interval.estimate, height, style.marker, color=style.color, mfc=fill, ms=8)
    shown_step = "" if step == study.rl.steps else f", step {step}"
    _write_beside(panel, f"{accuracy:.3f}{shown_step}", height)


def _write_beside(panel: Axes, text: str, height: float) -> None:
    panel.annotate(
        text,
        xy=(1.0, height),
        xycoords=("axes fraction", "data"),
        xytext=(3, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
    )
