"""Which layers and kinds of weights drift first?

Drift is counted by what rollouts see of it: moved(t) is the sum over the observations up to step t
of the share of codes that flipped since the one before. A code that flips back counts again. A
layer or a kind has drifted where the mean of its weights and seeds first is `MOVED`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from analysis.drift.maps import COLORS, draw_cells
from analysis.markdown import markdown_table
from analysis.style import new_figure
from experiments.runs.drift import KL

MOVED = 0.1
Group = Literal["layer", "kind"]
GROUPS: tuple[Group, ...] = get_args(Group)
Runs = Mapping[str, Sequence[pd.DataFrame]]
"""By the label of an arm, the rows of its seeds."""
FLIPS = "flipped_codes"
CELL_INCHES = 0.19
MOST_TICKS = 10
EMPTY = "-"
TABLE_NOTE = (
    f"First step by which {MOVED:.0%} of the codes have flipped, in brackets the share at the end. "
    "KL: of this layer alone rounded, at the last look, in nats a token. Means over seeds."
)


def moved(runs: Sequence[pd.DataFrame], group: Group) -> pd.DataFrame:
    """Mean over weights and seeds: an index of layers or kinds, columns of steps.

    A run that is shorter than the others is left out of the steps that it did not do.
    """
    tables = []
    for seed, rows in enumerate(runs):
        weights = rows[(rows["kind"] != "kl") & rows["layer"].notna()].sort_values("step")
        total = weights.groupby(["layer", "kind"])[FLIPS].cumsum()
        tables.append(weights.assign(seed=seed, layer=weights["layer"].astype(int), moved=total))
    return pd.concat(tables).pivot_table(index=group, columns="step", values="moved")


def first_steps(table: pd.DataFrame) -> dict[str, int | None]:
    """The first step of each row of `moved` that has that share; None where none has."""
    reached = {str(name): values[values >= MOVED] for name, values in table.iterrows()}
    return {name: int(its.index[0]) if len(its) else None for name, its in reached.items()}


def layer_kl(runs: Sequence[pd.DataFrame]) -> dict[str, float]:
    """Of each layer rounded alone the KL at the last look, in nats a token; mean over seeds."""
    known = [rows.dropna(subset=[KL]) for rows in runs if KL in rows]
    last = pd.concat([it[it["step"] == it["step"].max()] for it in known]) if known else None
    if last is None or last.empty:
        return {}
    return {str(int(n)): float(kl) for n, kl in last.groupby("layer")[KL].mean().items()}


def draw(models: Mapping[str, Runs]) -> Figure:
    """Of each model a row of maps for layers and one for kinds, a column an arm."""
    tables = {
        (model, group): _same_rows({arm: moved(seeds, group) for arm, seeds in runs.items()})
        for model, runs in models.items()
        for group in GROUPS
    }
    arms = list(next(iter(models.values())))
    maps = [table for row in tables.values() for table in row.values()]
    norm = Normalize(0, max(it.max().max() for it in maps))
    grey = " Grey: not in NVFP4." if any(it.isna().all(axis=1).any() for it in maps) else ""
    heights = [0.35 + CELL_INCHES * max(map(len, row.values())) for row in tables.values()]
    figure, axes = new_figure(
        "Flipped NVFP4 codes by layer and kind of weight",
        "Codes that have flipped, summed over the observations up to a step, as a share of all "
        "codes; mean over weights and seeds.\nA cell ends with the step that it was measured at. "
        f"White: the first at which it is {MOVED:.0%}.{grey}",
        height_inches=1.0 + 0.3 * len(models) + sum(heights),
        has_legend=False,
        nrows=len(tables),
        ncols=len(arms),
        sharex="col",
        sharey="row",
        height_ratios=heights,
    )
    for panels, ((model, group), row) in zip(axes, tables.items(), strict=True):
        names = next(iter(row.values())).index
        for panel, table in zip(panels, row.values(), strict=True):
            _draw_map(panel, table, norm)
        panels[0].set_yticks(range(len(names)), [str(name).split(".")[-1] for name in names])
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        panels[0].set_ylabel(group)
        if group == GROUPS[0]:
            for panel, arm in zip(panels, arms, strict=True):
                panel.set_title(f"{model}\n{arm}", fontsize=9.5)
    for panel in axes[-1]:
        panel.set_xlabel("training step")
    colors = ScalarMappable(norm, COLORS)
    figure.colorbar(colors, ax=axes, pad=0.01).set_label("flipped codes (share of all codes)")
    return figure


def _same_rows(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Tables with the rows of all of them, not a number where an arm has none."""
    names = sorted({name for table in tables.values() for name in table.index})
    return {arm: table.reindex(names) for arm, table in tables.items()}


def _draw_map(panel: Axes, table: pd.DataFrame, norm: Normalize) -> None:
    draw_cells(panel, table.set_axis(range(len(table)), axis="index"), norm)
    steps = table.columns.to_list()  # those that were measured; the last one has a tick
    panel.set_xticks(steps[:: -len(steps) // MOST_TICKS])
    for row, step in enumerate(first_steps(table).values()):
        if step is not None:
            panel.plot(step, row, "|", color="white", markersize=9, mew=1.6)


def order_table(runs: Runs) -> str:
    """Markdown: a row a layer and a kind of weight, an arm's columns next to each other."""
    rows = []
    for group in GROUPS:
        same = _same_rows({arm: moved(seeds, group) for arm, seeds in runs.items()})
        tables = {arm: table.rename(index=str) for arm, table in same.items()}
        for name in next(iter(tables.values())).index:
            row = {"Weights": f"layer {name}" if group == "layer" else name}
            for arm, seeds in runs.items():
                row[arm] = _show_moved(tables[arm], name)
                if kl := layer_kl(seeds):
                    has_own = group == "layer" and name in kl
                    row[f"{arm}, KL"] = f"{kl[name]:.1e}" if has_own else EMPTY
            rows.append(row)
    return f"{markdown_table(rows)}\n\n{TABLE_NOTE}"


def _show_moved(table: pd.DataFrame, name: str) -> str:
    if table.loc[name].isna().all():
        return EMPTY
    step = first_steps(table)[name]
    return f"{'never' if step is None else step} ({table.loc[name].iloc[-1]:.0%})"
