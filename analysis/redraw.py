"""Judges and draws records again: `python -m analysis.redraw [--study FILE]`, by `make figures`.

All of them share the processor, the largest first; then come the benchmarks, and what documents
show of records.
"""

import argparse
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

from analysis.claims import judge
from analysis.documents import RECORDS, Page, page_of, pages_of_all
from analysis.figure_files import recorded_names
from analysis.figures import BENCHMARK_FIGURES, Canvas, drawings
from analysis.figures.front import BENCHMARKS, MACHINE, draw_front
from analysis.load import recorded_study
from analysis.style import save_figure
from analysis.tables.rows import read_servings
from experiments.runs.metrics import METRICS
from experiments.runs.record import FILES
from experiments.study.load import load_study
from experiments.study.schema import ROOT
from experiments.support.cli import run_cli


def judge_record(record: Path) -> None:
    """Writes a record's claims."""
    judge(recorded_study(record), record).write(record)


@cache
def figures(record: Path) -> Mapping[str, Callable[[], Canvas]]:
    """What there is to draw of a record; read once, for all processes."""
    (record / "figures").mkdir(exist_ok=True)
    study = recorded_study(record)
    drawn = drawings(study, record).figures
    return {name: drawn[name] for name in recorded_names(study)}


def draw(record: Path, name: str) -> None:
    """Writes one of its figures."""
    save_figure(figures(record)[name], record / "figures" / f"{name}.png")


def redraw(record: Path) -> None:
    """Writes a record's claims, figures and page."""
    judge_record(record)
    for name in figures(record):
        draw(record, name)
    page_of(record).write()


def draw_benchmarks() -> None:
    """Writes the figures of Qwen3 at true size."""
    servings = read_servings(BENCHMARKS, MACHINE)
    for name, it in BENCHMARK_FIGURES.items():
        save_figure(partial(it, servings), BENCHMARKS / "figures" / f"{name}.png")


def main() -> None:
    """Draws one study's record, or all there is."""
    parser = argparse.ArgumentParser(description="Judge and draw records again.")
    parser.add_argument("--study", type=Path, help="file of the only study")
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        if args.study:
            record = ROOT / RECORDS / load_study(args.study).study
            if not (record / "study.yaml").is_file():
                hint = f"make one with make record STUDY={record.name}"
                raise ValueError(f"{record}: no record; {hint}")
            judged = pool.submit(judge_record, record)
            drawn = [pool.submit(draw, record, name) for name in figures(record)]
            for it in (judged, *drawn):
                it.result()
            page_of(record).write()
            return
        found = [path.parent for path in (ROOT / RECORDS).glob(f"*/{FILES[METRICS]}")]
        found.sort(key=lambda it: (it / FILES[METRICS]).stat().st_size, reverse=True)
        of_records = [pool.submit(redraw, it) for it in found]
        for it in (*of_records, pool.submit(draw_benchmarks), pool.submit(draw_front)):
            it.result()
        list(pool.map(Page.write, pages_of_all()))


if __name__ == "__main__":
    run_cli(main)
