"""Table of the k3 KL between trainer and vLLM on the same sampled tokens."""

from pathlib import Path

import pandas as pd

from analysis.benchmark_records import read_batches, read_record, record_paths
from analysis.claims_table import show_ratio
from analysis.stats import Array, ratio_over_seeds
from analysis.tables.rows import RowsRecord, sections_of
from experiments.benchmarks.records import Column, Row

RATIOS = {  # arm, and that which it is compared with
    "QAT / BF16": ("qat-pow2", "bf16"),
    "QAT, amax scale / BF16": ("qat-amax", "bf16"),
    "No QAT / BF16": ("no-qat", "bf16"),
    "QAT / rounded weights in BF16": ("qat-pow2", "rounded"),
}
COLUMNS = {
    "model": Column(heading="Model"),
    "seeds": Column(heading="Seeds", format=","),
    "tokens": Column(heading="Tokens an arm", format=","),
    "floor": Column(heading="BF16, nats a token", format=".2e"),
} | {name: Column(heading=name) for name in RATIOS}
NOTE = (
    "k3 KL between trainer and vLLM on sampled tokens, 95 % intervals over seeds. Mean over all "
    "tokens of a seed, ratio in the typical seed, Student's interval over the seeds: "
    "the estimator of the claims. QAT: power-of-two scale. A model that was not trained rounded is "
    "less certain once it is rounded, which raises the KL of equal bits: the last column is "
    "against its rounded weights served in BF16. Kernels: nvfp4 is Marlin. In an MoE a few "
    "rerouted tokens carry much of the KL, in BF16 too."
)


def parity_sections(folder: Path, machine: str) -> list[str]:
    """A row a model, of all parity records of a machine by name; their batches lie beside them."""
    records = []
    first = folder / f"parity_{machine}.json"
    for path in record_paths(folder, f"parity*_{machine}.json") or [first]:
        record, batches = read_record(path, RowsRecord), read_batches(path)
        models = dict.fromkeys(str(row["model"]) for row in record.rows)
        rows = [_row(model, batches[batches["model"] == model]) for model in models]
        shown = {"columns": COLUMNS, "rows": rows, "note": NOTE}
        records.append(record.model_copy(update=shown))
    return sections_of(records)


def _row(name: str, batches: pd.DataFrame) -> Row:
    sums = batches.assign(sums=batches["k3_kl"] * batches["tokens"])
    totals = sums.groupby(["arm", "seed"])[["sums", "tokens"]].sum()
    means = (totals["sums"] / totals["tokens"]).unstack("seed")
    if means.isna().any(axis=None):
        raise ValueError(f"parity of {name}: arms of other seeds; record it again")
    arms: dict[str, Array] = {str(arm): means.loc[arm].to_numpy() for arm in means.index}
    ratios: Row = {it: _ratio(arms.get(a), arms.get(b)) for it, (a, b) in RATIOS.items()}
    return ratios | {
        "model": name,
        "seeds": means.shape[1],
        "tokens": int(totals["tokens"].groupby("arm").sum().min()),
        "floor": float(arms["bf16"].mean()),
    }


def _ratio(arm: Array | None, floor: Array | None) -> str | None:
    """An arm's mean over a floor's, None where either was not measured."""
    if arm is None or floor is None:
        return None
    found = ratio_over_seeds(arm, floor)
    if found is None or found.low is None or found.high is None:
        return "no ratio"
    return f"{show_ratio(found.estimate)} ({show_ratio(found.low)} to {show_ratio(found.high)})"
