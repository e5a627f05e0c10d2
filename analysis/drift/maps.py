"""Maps of the drift of runs side by side: a row a measure, a column a run, layers by steps."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.metrics import CATALOGUE
from analysis.style import new_figure

PREFIX = "drift/"
ROW_INCHES = 1.7
COLORS = "viridis"
NOT_MEASURED = "#d9d9d9"


def layer_by_step(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Mean over a layer's weights: an index of layers, columns of steps."""
    known = rows.dropna(subset=[measure, "layer"]) if measure in rows else rows[:0]
    if known.empty:
        return pd.DataFrame()
    return known.pivot_table(index="layer", columns="step", values=measure, aggfunc="mean")


def draw(runs: Mapping[str, pd.DataFrame], measures: Sequence[str]) -> Figure:
    """A row a measure with one scale of colours, a column a run."""
    maps = {m: {run: layer_by_step(rows, m) for run, rows in runs.items()} for m in measures}
    figure, axes = new_figure(
        "Drift of quantized weights by layer and training step",
        "Mean over a layer's quantized weights. A cell ends with the step that it was measured at. "
        "Grey: not measured.",
        height_inches=0.9 + ROW_INCHES * len(measures),
        nrows=len(measures),
        ncols=len(runs),
        sharex="col",
        sharey=True,
    )
    for row, measure in zip(axes, measures, strict=True):
        norm = _norm([table.to_numpy() for table in maps[measure].values()])
        image = None
        for panel, table in zip(row, maps[measure].values(), strict=True):
            image = draw_cells(panel, table, norm) or image
        row[0].set_ylabel("layer")
        if image is not None:
            label = CATALOGUE[PREFIX + measure].label.replace(" ", "\n", 1)
            figure.colorbar(image, ax=list(row), pad=0.01).set_label(label, fontsize=8.5)
    for panel, run in zip(axes[0], runs, strict=True):
        panel.set_title(run, fontsize=9.5)
    for panel, rows in zip(axes[-1], runs.values(), strict=True):
        panel.set_xlabel("training step")
        panel.set_xlim(rows["step"].min() - 0.5, rows["step"].max() + 0.5)
    return figure


def _norm(tables: Sequence[np.ndarray]) -> Normalize:
    """Logarithmic where values span more than a factor of ten."""
    values = np.concatenate([table.ravel() for table in tables])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if len(positive) == 0:
        return Normalize(0, 1)
    if positive.max() > 10 * positive.min():
        return LogNorm(float(positive.min()), float(positive.max()))
    return Normalize(float(values.min()), float(values.max()))


def draw_cells(panel: Axes, table: pd.DataFrame, norm: Normalize) -> QuadMesh | None:
    """Rows of a table over its columns, which are steps; None where there is nothing to draw."""
    panel.set_facecolor(NOT_MEASURED)
    panel.grid(visible=False)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    if table.empty:
        return None
    steps, layers = table.columns.to_numpy(float), table.index.to_numpy(float)
    width = np.diff(steps).min() if len(steps) > 1 else 1.0
    # a cell ends with its step: what is measured every tenth step stands for the ten up to it
    x = np.concatenate([[steps[0] - width], steps]) + 0.5
    y = np.concatenate([layers, [layers[-1] + 1]]) - 0.5
    # zero has no colour on a logarithmic scale: it gets the lowest
    values = np.ma.masked_invalid(table.to_numpy()).clip(min=norm.vmin or 0.0)
    return panel.pcolormesh(x, y, values, norm=norm, cmap=COLORS)
