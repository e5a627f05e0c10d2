"""Figure: offline accuracy by training step, every arm in both precisions."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.parity.accuracy import PRECISIONS
from analysis.results import Results
from analysis.style import add_legend, arm_style, grid_by_model
from experiments.study.schema import Study

DODGE = 0.015  # of all steps, between arms


def draw(study: Study, results: Results) -> Figure:
    """A column a model, a row a precision; all arms start from the base model."""
    seeds = "Thin: seeds. Thick: their mean." if len(study.seeds) > 1 else "One seed."
    figure, axes = grid_by_model(
        study,
        "Offline accuracy by training step, held-out prompts, answers sampled at temperature "
        f"{study.evaluation.temperature}",
        f"{seeds} Arms are drawn side by side; the axis has the steps that were evaluated, 0 is "
        "the base model.\nA row evaluates all "
        "checkpoints in one precision, so that arms compare. NVFP4: as in the arm's own rollouts"
        + ("; BF16's as those without QAT." if "bf16" in study.arms else "."),
        height_inches=4.76,
        row_labels=[f"accuracy in {name}\n(share of answers)" for name in PRECISIONS.values()],
        sharey=True,
    )
    for row, precision in zip(axes, PRECISIONS, strict=True):
        for panel, model in zip(row, study.models, strict=True):
            for arm in study.arms:
                _draw_arm(panel, study, results, model, arm, precision)
            evaluated = [results.evaluated_steps(model, arm) for arm in study.arms]
            panel.set_xticks(sorted(set(np.concatenate(evaluated).tolist())))
    add_legend(figure, axes[0][0])
    return figure


def _draw_arm(
    panel: Axes, study: Study, results: Results, model: str, arm: str, precision: str
) -> None:
    style, steps = arm_style(arm), results.evaluated_steps(model, arm)
    place = study.arms.index(arm) - (len(study.arms) - 1) / 2
    x = steps + DODGE * study.rl.steps * place
    by_step = [results.correct_answers(model, arm, int(step), precision) for step in steps]
    accuracies = [correct_SP.mean(1) / samples for correct_SP, samples in by_step]
    for of_seed in zip(*accuracies, strict=True):
        panel.plot(x, of_seed, **style.line, lw=0.6, alpha=0.6)
    means = [float(accuracy_S.mean()) for accuracy_S in accuracies]
    panel.plot(x, means, **style.line, lw=1.8, marker=style.marker, ms=5, label=style.label)
