"""What a decoder layer's matrix products cost together, from a record of `matmul.py`.

    python -m experiments.benchmarks.matmul_summary experiments/records/benchmarks/matmul_h100.json

Microseconds by tokens and way to multiply, and as multiples of the BF16 arm's speed. Dense layers
and experts are added up apart: their arms differ. A way that lacks one of the products is left out.
"""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.support.cli import run_cli
from experiments.support.json_files import read_json

BF16 = {"dense": "bf16", "experts": "triton bf16"}
Totals = dict[int, dict[str, float]]


def totals(cases: list[dict[str, Any]], model: str, kind: str) -> Totals:
    """Median microseconds of all products of one kind in a decoder layer, by tokens and arm."""
    chosen = [
        row
        for row in cases
        if row["layer"].startswith(f"{model}.") and bool(row["experts_hit"]) == (kind == "experts")
    ]
    names = {row["layer"] for row in chosen}
    result: Totals = {}
    for tokens in sorted({row["tokens"] for row in chosen}):
        rows = [row for row in chosen if row["tokens"] == tokens]
        if {row["layer"] for row in rows} != names:
            continue
        arms = [arm for arm in rows[0]["arms"] if all(arm in row["arms"] for row in rows)]
        times = {arm: sum(row["arms"][arm]["us"][1] for row in rows) for arm in arms}
        floors = {
            f"floor {weights}": sum(row["floor_us"][weights] for row in rows)
            for weights in ("nvfp4", "bf16")
        }
        result[tokens] = floors | times
    return result


def print_totals(title: str, by_tokens: Totals, baseline: str) -> None:
    """Microseconds, and the speed as a multiple of the baseline's."""
    arms = list(dict.fromkeys(arm for times in by_tokens.values() for arm in times))
    table = Table("tokens", *arms, title=title)
    for tokens, times in by_tokens.items():
        cells = []
        for arm in arms:
            speed = (
                f" ({times[baseline] / times[arm]:.2f}x)" if {baseline, arm} <= set(times) else ""
            )
            cells.append(f"{times[arm]:.0f}{speed}" if arm in times else "")
        table.add_row(str(tokens), *cells)
    Console(width=200).print(table)


def main() -> None:
    """Prints a table for each model and kind of product."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("record", type=Path, help="of `matmul`")
    record_path: Path = parser.parse_args().record
    hint = "name a record of `matmul`"
    record = read_json(record_path, hint)
    if record.get("benchmark") != "matmul":
        raise ValueError(f"{record_path}: benchmark: {record.get('benchmark')}; {hint}")
    for model in dict.fromkeys(row["layer"].partition(".")[0] for row in record["cases"]):
        for kind, baseline in BF16.items():
            if by_tokens := totals(record["cases"], model, kind):
                print_totals(f"{model}, {kind}, us a layer", by_tokens, baseline)


if __name__ == "__main__":
    run_cli(main)
