"""The drift of a run's weights: JSON lines while it trains, a CSV once recorded.

One row a weight and observed step, as `qat_core.drift.log` writes them; the KL of a layer is the
measure `layer_kl` of rows of the kind `kl`.
"""

import gzip
import math
import zlib
from pathlib import Path

import pandas as pd

from experiments.runs.metrics import GZIP
from experiments.support.json_files import parse_object, read_bytes
from qat_core.drift.names import FILE, MEASURES

RECORDED_DRIFT = "drift.csv.gz"
KL = "layer_kl"
HINT = "train the run with rl.drift_every: 1"
KEYS = ["step", "layer", "kind"]
NUMBERS = ("layer", "kl", "kl_together", *MEASURES)


def has_drift(run_dir: Path) -> bool:
    """Whether a run or its record holds the drift of its weights."""
    return (run_dir / FILE).is_file() or (run_dir / RECORDED_DRIFT).is_file()


def read_drift(run_dir: Path) -> pd.DataFrame:
    """The rows of a run or its record; of repeated ones the last counts.

    Raises:
        ValueError: the file is missing, empty or damaged.
    """
    recorded = run_dir / RECORDED_DRIFT
    path = recorded if recorded.exists() else run_dir / FILE
    rows = _read_csv(path) if recorded.exists() else _read_jsonl(path)
    if rows.empty:
        raise ValueError(f"{path}: empty; {HINT}")
    return rows.drop_duplicates(KEYS, keep="last", ignore_index=True)


def write_drift(path: Path, rows: pd.DataFrame) -> None:
    """Writes a drift.csv.gz; the same rows give the same bytes."""
    rows.to_csv(path, index=False, compression=GZIP)


def _read_jsonl(path: Path) -> pd.DataFrame:
    rows = []
    for number, line in enumerate(read_bytes(path, HINT).splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):  # cut short by a kill; the step is repeated
            continue
        where, hint = f"{path}: line {number}", "not a row of drift; remove it"
        row = parse_object(line, where, hint)
        try:
            numbers = {key: float(row[key]) for key in NUMBERS if row.get(key) is not None}
            if math.isinf(numbers.get("layer", 0.0)):
                raise ValueError(row["layer"])
            rows.append({"step": int(row["step"]), "kind": str(row["kind"]), **numbers})
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(f"{where}: {hint}") from None
    return pd.DataFrame(rows).rename(columns={"kl": KL})


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        rows = pd.read_csv(path)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}; record the study again") from None
    if missing := set(KEYS) - set(rows):
        raise ValueError(f"{path}: no column {min(missing)}; record the study again")
    return rows
