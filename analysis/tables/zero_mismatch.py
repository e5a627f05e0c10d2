"""Table of log-probs that differ in any bit between trainer and vLLM, a row a case."""

from collections.abc import Sequence
from pathlib import Path

from analysis.tables.rows import number, read_records, sections_of, verdict
from experiments.benchmarks.records import Row


def zero_mismatch_sections(folder: Path, machine: str) -> list[str]:
    """Of `zero_mismatch_MACHINE.json` and others that begin so."""
    records = read_records(folder, machine, "zero_mismatch")
    return sections_of([it.model_copy(update={"rows": _by_case(it.rows)}) for it in records])


def _by_case(comparisons: Sequence[Row]) -> list[Row]:
    cases: dict[str, list[Row]] = {}
    for row in comparisons:
        cases.setdefault(str(row["case"]), []).append(row)
    # as they ended is no order, since several run at once
    names = sorted(cases, key=lambda name: (name.startswith("control"), name))
    return [_row(cases[name]) for name in names]


def _row(rows: Sequence[Row]) -> Row:
    """One case, over all states of its weights and all batches."""
    tokens = [number(row, "tokens") for row in rows]
    unequal = sum(number(row, "unequal") for row in rows)
    k3_sum = sum(number(row, "k3_kl") * n for row, n in zip(rows, tokens, strict=True))
    is_zero = all(row["expected_zero"] for row in rows)
    return rows[0] | {
        "after": ", ".join(dict.fromkeys(str(row["after"]) for row in rows)),
        "tokens": int(sum(tokens)),
        "unequal": int(unequal),
        "largest_difference": max(number(row, "largest_difference") for row in rows),
        "k3_kl": k3_sum / max(sum(tokens), 1),
        "expected_zero": f"{'0' if is_zero else 'some'}, {verdict((unequal == 0) == is_zero)}",
    }
