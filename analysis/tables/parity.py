"""Table of the k3 KL between trainer and vLLM on the same sampled tokens."""

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from analysis.claims_table import show_ratio
from analysis.markdown import MarkdownTable
from analysis.stats import Array, ratio_over_seeds
from analysis.tables.engines import PRECISIONS
from analysis.tables.record import EngineRecord, read_record

ARMS = {"qat-pow2": "QAT", "qat-amax": "QAT, amax scale", "no-qat": "No QAT"}
TITLE = "**k3 KL between trainer and vLLM on sampled tokens, 95 % intervals over seeds**"
NOTE = (
    "Mean over all tokens of a seed, ratio in the typical seed, Student's interval over the seeds: "
    "the estimator of the claims. QAT: power-of-two scale. A model that was not trained rounded is "
    "less certain once it is rounded, which raises the KL of equal bits: the last column is "
    "against its rounded weights served in BF16. In an MoE a few rerouted tokens carry much of the "
    "KL, in BF16 too."
)


class ParityRecord(EngineRecord):
    """Of experiments/benchmarks/parity.py, by name of a model; its batches lie beside it."""

    weights: str
    kernels: str
    models: dict[str, object]


class Parity(NamedTuple):
    """One model's arms: each seed's mean k3 KL, and the tokens of all seeds."""

    name: str
    commit: str
    means: dict[str, Array]
    tokens: dict[str, int]

    def ratio(self, arm: str, floor: str) -> str:
        """An arm's mean over a floor's, empty where either was not measured."""
        if arm not in self.means or floor not in self.means:
            return ""
        found = ratio_over_seeds(self.means[arm], self.means[floor])
        if found is None or found.low is None or found.high is None:
            return "no ratio"
        low, high = show_ratio(found.low), show_ratio(found.high)
        return f"{show_ratio(found.estimate)} ({low} to {high})"


PARITY_TABLE: MarkdownTable[Parity] = MarkdownTable(
    {
        "Model": lambda row: row.name,
        "Commit": lambda row: row.commit,
        "Seeds": lambda row: str(len(row.means["bf16"])),
        "Tokens an arm": lambda row: f"{min(row.tokens.values()):,}",
        "BF16, nats a token": lambda row: f"{row.means['bf16'].mean():.2e}",
    }
    | {
        f"{label} / BF16": lambda row, arm=arm: row.ratio(arm, "bf16")
        for arm, label in ARMS.items()
    }
    | {"QAT / rounded weights in BF16": lambda row: row.ratio("qat-pow2", "rounded")}
)


def read_parity(folder: Path, machine: str) -> tuple[list[ParityRecord], list[Parity]]:
    """All parity records of a machine by name, and their models in the same order."""
    records, models = [], []
    for path in sorted(folder.glob(f"parity*_{machine}.json")):
        record = read_record(path, ParityRecord)
        records.append(record)
        rows = pd.read_csv(path.with_suffix(".csv.gz"))
        multiplied_by = PRECISIONS[record.kernels].removeprefix("NVFP4")
        for name in record.models:
            compiled = ", torch.compile" if record.torch_compile else ""
            label = f"{name}, {record.weights} weights{multiplied_by}{compiled}"
            model = _parity(label, record.commit, rows, name)
            if len({len(means) for means in model.means.values()}) > 1:
                raise ValueError(f"{path}: models.{name}: arms of unequal length; record it again")
            models.append(model)
    return records, models


def parity_sections(models: list[Parity]) -> list[str]:
    """Title, table and note."""
    return [TITLE, PARITY_TABLE.markdown(models), NOTE]


def _parity(label: str, commit: str, rows: pd.DataFrame, name: str) -> Parity:
    own = rows[rows["model"] == name]
    own = own.assign(sums=own["k3_kl"] * own["tokens"])
    means, tokens = {}, {}
    for arm, of_arm in own.groupby("arm"):
        totals = of_arm.groupby("seed")[["sums", "tokens"]].sum()
        means[str(arm)] = (totals["sums"] / totals["tokens"]).to_numpy()
        tokens[str(arm)] = int(totals["tokens"].sum())
    return Parity(label, commit, means, tokens)
