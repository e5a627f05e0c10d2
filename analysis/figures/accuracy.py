"""Figure: offline accuracy after training, differences of arms within a seed against the margin.

A study without the BF16 arm has no difference to draw: its arms' own log-odds are drawn instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.parity.accuracy import (
    BF16,
    NOQAT,
    PRECISIONS,
    QAT,
    Served,
    accuracy_of_bf16,
    answers,
    difference,
)
from analysis.results import Array, Results
from analysis.stats import Interval, log_odds, over_seeds
from analysis.style import FAINT, arm_style, new_figure, shade_row, write_beside
from experiments.study.schema import Study

ROW_INCHES = 0.42
EDGE = 1.2  # a bound lies within the panel by this factor


class Row(NamedTuple):
    """What a row compares; without a control it is the arm alone."""

    served: Served
    control: Served | None
    low: float | None = None  # what the claim requires; None on an open side, and of no claim
    high: float | None = None

    @property
    def label(self) -> str:
        """The arm, its precision, and whom it is compared with if that is not BF16 in BF16."""
        arm, precision = arm_style(self.served.arm).label, PRECISIONS[self.served.precision]
        if self.control is None or self.control == BF16:
            return f"{arm}, in {precision}"
        control = arm_style(self.control.arm).label.removeprefix("NVFP4, ")
        return f"{arm} less {control},\nboth in {precision}"


def draw(study: Study, results: Results) -> Figure:
    """A panel a model, a row an arm and precision: seeds, their mean and its interval."""
    has_control = BF16.arm in study.arms
    is_judged = has_control and len(study.seeds) > 1
    rows = _rows(study)
    compared = " Difference to BF16 in BF16, where a row names no other arm." if has_control else ""
    shaded = "\nShaded: where a claim asks the whole interval to be." if is_judged else ""
    step_of = "that both arms did" if has_control else "that all seeds did"
    figure, axes = new_figure(
        f"Offline accuracy after training{', difference to BF16' if has_control else ''}",
        "A row: an arm, and the precision that its checkpoint is evaluated in (filled: BF16, open: "
        f"NVFP4), after the last step {step_of}.\nSmall dots: seeds; large: their mean, with its "
        "95 % interval where there are several. Accuracy: share of right answers, mean of the "
        f"seeds;\nanswers are sampled at temperature {study.evaluation.temperature}."
        f"{compared}{shaded}",
        height_inches=1.66 + ROW_INCHES * len(rows),
        has_legend=False,
        ncols=len(study.models),
        gridspec_kw={"wspace": 0.06},  # numbers stand beside the panels
        sharex=True,
        sharey=True,
    )
    for panel, model in zip(axes[0], study.models, strict=True):
        if has_control:
            panel.axvline(0, color=FAINT, linewidth=1)
        for position, row in enumerate(rows):
            _draw_row(panel, study, results, model, row, -position)
        reached = f": BF16 {accuracy_of_bf16(results, model):.3f}" if has_control else ""
        panel.set_title(f"{model}{reached}")
        panel.set_xlabel(f"{'difference' if has_control else 'accuracy'} (log-odds), right: better")
        write_beside(panel, "accuracy", 0.6)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="y", visible=False)
    for panel in axes[0]:
        if is_judged:
            _shade(panel, rows)
        panel.locator_params(axis="x", nbins=6)
    axes[0][0].set_yticks([-position for position in range(len(rows))], [it.label for it in rows])
    return figure


def _rows(study: Study) -> list[Row]:
    of_arms = [Served(arm, precision) for arm in study.arms for precision in PRECISIONS]
    if BF16.arm not in study.arms:
        return [Row(it, None) for it in of_arms]
    equal, served = study.claims.accuracy_log_odds, study.claims.served_log_odds
    required = {Served(QAT, "bf16"): (-equal, equal), Served(QAT, "nvfp4"): (-served, None)}
    rows = [Row(it, BF16, *required.get(it, ())) for it in of_arms if it != BF16]
    if QAT in study.arms:
        qat = Served(QAT, "nvfp4")
        if NOQAT in study.arms:
            rows.append(Row(qat, Served(NOQAT, "nvfp4"), low=0.0))
        rows.append(Row(qat, Served(BF16.arm, "nvfp4")))
    return rows


def _shade(panel: Axes, rows: Sequence[Row]) -> None:
    """Shades what is required, up to the panel's edge on an open side."""
    edges = [EDGE * it for row in rows for it in (row.low, row.high) if it is not None]
    left, right = panel.get_xlim()
    left, right = min([left, *edges]), max([right, *edges])
    for position, row in enumerate(rows):
        if row.low is None:
            continue
        high = right if row.high is None else row.high
        shade_row(panel, -position, row.low, high)
    panel.set_xlim(left, right)


def _values(results: Results, model: str, row: Row) -> tuple[int, Array, Interval, float]:
    """The step shown, what a row shows by seed and over seeds, and the mean accuracy."""
    served, control = row.served, row.control
    if control is not None:
        step = results.last_evaluated(model, served.arm, control.arm)
        found = difference(results, model, step, served, control)
        return step, found.seeds_S, found.interval, float(found.arm_S.mean())
    step = results.last_evaluated(model, served.arm)
    correct_S, num_answers = answers(results, model, served, step)
    values_S = log_odds(correct_S, num_answers)
    return step, values_S, over_seeds(values_S), float(correct_S.mean() / num_answers)


def _draw_row(
    panel: Axes, study: Study, results: Results, model: str, row: Row, height: float
) -> None:
    step, values_S, interval, accuracy = _values(results, model, row)
    style = arm_style(row.served.arm)
    fill = style.color if row.served.precision == "bf16" else "white"
    panel.plot(values_S, [height] * len(values_S), ".", color=style.color, ms=5)
    if interval.low is not None and interval.high is not None:
        panel.plot([interval.low, interval.high], [height] * 2, color=style.color, lw=2)
    panel.plot(interval.estimate, height, style.marker, color=style.color, mfc=fill, ms=8)
    # two arms' difference has no accuracy of its own
    shown = [f"{accuracy:.3f}"] if row.control in (None, BF16) else []
    if step != study.rl.steps:
        shown.append(f"step {step}")
    write_beside(panel, ", ".join(shown), height)
