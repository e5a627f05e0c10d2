"""A user's own verl run over the recorded curves.

    python -m analysis.overlay MY_RUN --out overlay.png
    python -m analysis.overlay RUN_ID --mlflow sqlite:///mlflow.db --out overlay.png

MY_RUN is a folder or file of verl's file logger; with `--mlflow`, a run's id there.
"""

import argparse
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.load import read_metrics
from analysis.metrics import CATALOGUE
from analysis.style import INK, add_legend, arm_style, new_figure, save_figure
from experiments.runs.attempts import list_run_dirs
from experiments.study.arms import ARMS
from experiments.study.schema import ROOT
from experiments.study.yaml_file import suggest
from experiments.support.cli import run_cli
from qat_core.doctor.verl_run import BANDS, K3, read_run

DEFAULT_METRICS = (K3, "critic/score/mean")
DEFAULT_RECORDS = ROOT / "experiments" / "records" / "verl-gpu"


def read_mlflow(store: str, run_id: str, metrics: tuple[str, ...]) -> pd.DataFrame:
    """A run of an MLflow store, a row a step."""
    from mlflow import MlflowClient

    from experiments.tracking.store import SQLITE, STORE_ERRORS, limit_requests

    limit_requests()
    if store.startswith(SQLITE) and not Path(store.removeprefix(SQLITE)).is_file():
        raise ValueError(f"--mlflow: {store}: no such file; name a store and a run")  # not made
    try:
        client = MlflowClient(store)
        histories = {name: client.get_metric_history(run_id, name) for name in metrics}
    except (*STORE_ERRORS, ValueError) as error:  # the last of an address that is none
        reason = " ".join(str(error).split())
        raise ValueError(f"--mlflow: {store}: {run_id}: {reason}; name a store and a run") from None
    columns = {n: {point.step: point.value for point in h} for n, h in histories.items() if h}
    if not columns:
        raise ValueError(f"{store}: {run_id}: has none of {', '.join(metrics)}")
    return pd.DataFrame(columns).rename_axis("step").sort_index().reset_index()


def read_verl(path: Path) -> pd.DataFrame:
    """A run of verl's file logger, a row a step."""
    run = read_run(path)
    return pd.DataFrame({"step": run.steps, **run.metrics})


def read_recorded(records: Path, model: str) -> dict[str, list[pd.DataFrame]]:
    """The recorded runs of one model by arm, a frame a seed."""
    arms, runs = dict[str, list[pd.DataFrame]](), list_run_dirs(records)
    for arm in ARMS:
        named = [it for it in runs if it.name.startswith(f"{model}_{arm}_seed")]
        if named:
            arms[arm] = [read_metrics(run_dir) for run_dir in named]
    if not arms:
        models = sorted({path.name.split("_")[0] for path in runs})
        if not models:
            raise ValueError(f"--records: {records}: no runs; name a folder of experiments/records")
        raise ValueError(f"{records}: no runs of {model}; --model is one of {', '.join(models)}")
    return arms


def draw(
    own: pd.DataFrame,
    name: str,
    recorded: Mapping[str, list[pd.DataFrame]],
    metrics: tuple[str, ...],
    kind: str,
) -> Figure:
    """A panel a metric: a thin line a recorded run, and the user's run over them."""
    known = {str(name) for frame in chain([own], *recorded.values()) for name in frame} - {"step"}
    for metric in (metric for metric in metrics if metric not in known):
        hint = suggest(metric, sorted(known), f"there are {', '.join(sorted(known))}")
        raise ValueError(f"--metrics: {metric}: in no run; {hint}")
    seeds = max(len(frames) for frames in recorded.values())
    shown = "a line a seed" if seeds > 1 else "one seed"
    low, high = BANDS[kind]
    figure, axes = new_figure(
        f"{name} over the recorded runs",
        f"Coloured: recorded arms, {shown}. "
        f"Shaded: {low:.0e} to {high:.0e}, usual of BF16 on both sides ({kind}).",
        height_inches=3.9,
        ncols=len(metrics),
    )
    for panel, metric in zip(axes[0], metrics, strict=True):
        _draw_panel(panel, own, name, recorded, metric)
        panel.set_xlabel("training step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_ylabel(CATALOGUE[metric].axis_label if metric in CATALOGUE else metric)
        if metric == K3:
            panel.set_yscale("log")
            panel.axhspan(low, high, color="#e9e4d4", zorder=0)
    add_legend(figure, axes[0][0])
    return figure


def _draw_panel(
    panel: Axes,
    own: pd.DataFrame,
    name: str,
    recorded: Mapping[str, list[pd.DataFrame]],
    metric: str,
) -> None:
    for arm, frames in recorded.items():
        style, label = arm_style(arm), arm_style(arm).label
        for frame in (frame for frame in frames if metric in frame):
            panel.plot(frame["step"], frame[metric], **style.line, label=label, lw=0.9)
            label = "_"  # the legend names an arm once
    if metric in own:
        values = own[metric].to_numpy(float)
        shown = np.isfinite(values)
        panel.plot(own["step"][shown], values[shown], color=INK, lw=2.2, label=name)


def main() -> None:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description="Draw a verl run over the recorded curves.")
    add = parser.add_argument
    add("run", help="folder or file of verl's file logger; with --mlflow a run id")
    add("--mlflow", metavar="URI", help="tracking store of the run")
    add("--records", type=Path, default=DEFAULT_RECORDS, help="a recorded study")
    add("--model", default="nano-dense-gpu", help="whose recorded runs")
    add("--metrics", nargs="+", default=list(DEFAULT_METRICS))
    add("--band", choices=sorted(BANDS), default="dense", help="kind of model")
    add("--out", type=Path, required=True, help="PNG file")
    arguments = parser.parse_args()
    metrics = tuple(arguments.metrics)
    if arguments.mlflow:
        own, name = read_mlflow(arguments.mlflow, arguments.run, metrics), arguments.run
    else:
        own, name = read_verl(Path(arguments.run)), Path(arguments.run).resolve().stem
    recorded = read_recorded(arguments.records, arguments.model)
    save_figure(partial(draw, own, name, recorded, metrics, arguments.band), arguments.out)


if __name__ == "__main__":
    run_cli(main)
