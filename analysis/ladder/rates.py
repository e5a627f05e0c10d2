"""The learning rate of a rung: what BF16 did best with, at seeds that no rung has.

Of the rates at which no run collapsed, that of the highest mean reward over all steps, and of equal
ones the lowest. Runs without QAT and with it play no part.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from analysis.collapse.data import GridData
from analysis.collapse.grid import BF16, num_collapsed, show_rate
from analysis.collapse.survival import Outcome
from analysis.load import recorded_study
from analysis.markdown import markdown_table


def chosen_rate(outcomes: Mapping[float, Sequence[Outcome]]) -> float | None:
    """Of outcomes by learning rate; None where runs collapsed at every rate."""
    rewards = {
        lr: fmean(it.area for it in its)
        for lr, its in sorted(outcomes.items())
        if not num_collapsed(its)
    }
    return max(rewards, key=rewards.__getitem__) if rewards else None


def rates_text(record: Path) -> str:
    """Markdown of each model's rates, the chosen one marked; models without a run are left out."""
    data = GridData(recorded_study(record), record)
    rows = []
    for model in dict.fromkeys(it.model for it in data.grid):
        outcomes = {}
        for lr in sorted({it.lr for it in data.design.settings if it.model == model}):
            setting = data.design.plain(BF16, lr)._replace(model=model)
            if setting in data.grid:
                outcomes[lr] = data.grid[setting]
            elif setting in data.design.settings:  # with it, another one might be chosen
                raise ValueError(
                    f"{record}: {setting}: not all runs; run study {data.study.study} to its end"
                )
        chosen = chosen_rate(outcomes)
        rows += [
            {
                "Model": model,
                "Learning rate": show_rate(lr),
                "Mean reward": f"{fmean(it.area for it in its):.3f}",
                "Collapsed": f"{num_collapsed(its)} of {len(its)}",
                "Chosen": "yes" if lr == chosen else "",
            }
            for lr, its in outcomes.items()
        ]
    return markdown_table(rows) + "\n"
