"""The drift of a run's weights: JSON lines, as `experiments.rl.drift_log` has them, or recorded."""

import math
from pathlib import Path

import pandas as pd

from experiments.rl.metric_names import DRIFT_FILE
from experiments.runs.record import file_of, record_of
from experiments.support.json_files import parse_object, read_bytes
from qat_core.drift import MEASURES

KL = "layer_kl"  # of a layer: a measure of rows of the kind `kl`
HINT = "train the run with rl.drift_every: 1"
KEYS = ["step", "layer", "kind"]
NUMBERS = ("layer", "kl", "kl_together", *MEASURES)


def read_drift(run_dir: Path) -> pd.DataFrame:
    """The rows of a run, of results or of a record; of repeated ones the last counts."""
    record, path = record_of(run_dir), file_of(run_dir, DRIFT_FILE)
    if record is None:
        rows = _read_jsonl(run_dir / DRIFT_FILE)
    else:
        rows = record.rows(DRIFT_FILE, run_dir.name).to_pandas()
    if rows.empty:
        raise ValueError(f"{path}: empty; {HINT}")
    if missing := set(KEYS) - set(rows):
        raise ValueError(f"{path}: no column {min(missing)}; record the study again")
    return rows.drop_duplicates(KEYS, keep="last", ignore_index=True)


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
