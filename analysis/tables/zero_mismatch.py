"""Table of log-probs that differ in any bit between trainer and vLLM, a row a case."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.tables.rows import number, read_records, sections_of, verdict
from experiments.benchmarks.records import Column, Row

PACKAGES = ["vllm", "torch", "transformers"]
COLUMNS = {
    "case": Column(heading="Case"),
    "model": Column(heading="Model"),
    "engine": Column(heading="Engine"),
    "trainer": Column(heading="Trainer"),
    "after": Column(heading="After steps"),
    "tokens": Column(heading="Tokens", format=","),
    "unequal": Column(heading="Unequal", format=","),
    "largest_difference": Column(heading="Largest difference, nats", format=".1e"),
    "k3_kl": Column(heading="k3 KL, nats a token", format=".1e"),
    "expected": Column(heading="Expected"),
}
NOTE = (
    "Log-probs of sampled tokens that differ in any bit, over all states of the weights and all "
    "ways of batching; each rank of FSDP2 compares all tokens, and counts them. After: optimizer "
    "steps and a sync. Moved by signs: a step moves weights by the signs of their gradients, as "
    "AdamW's first does; its moments do not fit. A control leaves one ingredient out, and has to "
    "differ."
)


def zero_mismatch_sections(folder: Path, machine: str) -> list[str]:
    """Of `zero_mismatch_MACHINE.json` and others that begin so."""
    records = read_records(folder, machine, "zero_mismatch")
    return sections_of([record.model_copy(update=_shown(record.rows)) for record in records])


def _shown(comparisons: Sequence[Row]) -> dict[str, Any]:
    cases: dict[str, list[Row]] = {}
    for row in comparisons:
        cases.setdefault(str(row["case"]), []).append(row)
    # as they ended is no order, since several run at once
    names = sorted(cases, key=lambda name: (name.startswith("control"), name))
    rows = [_row(cases[name]) for name in names]
    return {"packages": PACKAGES, "columns": COLUMNS, "rows": rows, "note": NOTE}


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
        "expected": f"{'0' if is_zero else 'some'}, {verdict((unequal == 0) == is_zero)}",
    }
