"""Which layers and kinds of weights drift first? `python -m analysis.drift RUN ... --out FILE`

RUN is the folder of a run or of its record. Seeds of one arm are drawn together, arms side by side,
and a table is printed. With `--measures` maps of these measures are drawn instead, a column a run.
"""

import argparse
from functools import partial
from pathlib import Path

import pandas as pd

from analysis.drift import maps, order
from analysis.style import save_figure
from experiments.runs.drift import KL, read_drift
from experiments.support.cli import run_cli
from qat_core.drift import MEASURES


def main() -> None:
    """Writes the figure."""
    parser = argparse.ArgumentParser(description="Which layers and kinds of weights drift first?")
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs or of their records")
    parser.add_argument("--measures", nargs="+", choices=(*MEASURES, KL), help="maps of these")
    parser.add_argument("--out", type=Path, required=True, help="PNG or SVG file")
    arguments = parser.parse_args()
    runs = {path.resolve().name: read_drift(path) for path in arguments.runs}
    if arguments.measures:
        save_figure(partial(maps.draw, runs, arguments.measures), arguments.out)
        return
    arms: dict[str, list[pd.DataFrame]] = {}
    for name, rows in runs.items():
        arms.setdefault(name.rpartition("_seed")[0] or name, []).append(rows)
    save_figure(partial(order.draw, {"": arms}), arguments.out)
    print(order.order_table(arms))


if __name__ == "__main__":
    run_cli(main)
