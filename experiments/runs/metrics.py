"""The metrics of a run: one row per step, in JSON lines until they are recorded."""

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from experiments.rl.metric_names import K3_KL, MISMATCH_COUNT, RESPONSE_TOKENS, REWARD, TOTAL_TOKENS
from experiments.runs.record import file_of, record_of
from experiments.support.json_files import parse_object, read_bytes

Row = dict[str, float | int | None]
METRICS = "metrics.jsonl"
# how the columns begin that the record of a grid keeps
GRID_METRICS = (
    "step",
    K3_KL,
    "rollout_corr/kl",
    MISMATCH_COUNT,
    # whether a correction acts, and how much
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_ratio_fraction_",
    "rollout_corr/rollout_is_eff_sample_size",
    "actor/entropy",
    "actor/grad_norm",
    "drift",
    REWARD,
    "response_length/",
    "timing_s/",
    TOTAL_TOKENS,
    "perf/max_memory_allocated_gb",
)


def read_jsonl(path: Path, hint: str, *, may_be_cut: bool = False) -> list[Row]:
    """The rows of a metrics.jsonl, whose last line has no end where a crash has cut it."""
    lines = read_bytes(path, hint).splitlines(keepends=True)
    return [
        _check_row(parse_object(line, where, hint), where, hint)
        for number, line in enumerate(lines, start=1)
        if (line.endswith(b"\n") or not may_be_cut) and (where := f"{path}: line {number}")
    ]


def read_rows(run_dir: Path, hint: str, keys: Collection[str] = ()) -> list[Row]:
    """The metrics of a finished run, of results or of a record; what is undefined is None."""
    record = record_of(run_dir)
    if record is None:
        return read_jsonl(run_dir / METRICS, hint)
    table, where = record.rows(METRICS, run_dir.name), file_of(run_dir, METRICS)
    if keys:
        table = table.select([it for it in table.column_names if it in ("step", *keys)])
    # NaN, which alone differs from itself, is undefined
    columns = ([it if it == it else None for it in c.to_pylist()] for c in table.columns)
    return [
        _check_row(dict(zip(table.column_names, values, strict=True)), f"{where}: row {n}", hint)
        for n, values in enumerate(zip(*columns, strict=True), start=1)
    ]


def merge(parts: Iterable[Iterable[Row]]) -> list[Row]:
    """One row per step in ascending order; of a step that is there twice the later row."""
    by_step = {step_of(row): row for rows in parts for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def step_of(row: Row) -> int:
    """The step of a row."""
    return int(row["step"] or 0)


def require_every_step(rows: Sequence[Row], where: str, hint: str, last: int | None = None) -> None:
    """Refuses merged rows that do not start at step 1, have a gap, or end before step `last`."""
    steps = {step_of(row) for row in rows}
    for step in range(1, (last or max(steps, default=0)) + 1):
        if step not in steps:
            raise ValueError(f"{where}: step {step} is missing; {hint}")


def _check_row(row: dict[str, object], where: str, hint: str) -> Row:
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise ValueError(f"{where}: step: {step!r} is not a whole number of 1 or more; {hint}")
    checked: Row = {}
    for key, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ValueError(f"{where}: {key}: {value!r} is not a number; {hint}")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{where}: {key}: {value!r} is not finite; {hint}")
        checked[key] = value
    return checked


def token_mean(rows: Sequence[Row], key: str) -> float | None:
    """Mean of a metric over all sampled tokens of a run.

    None where there is no step, or one of them has no value: k3 KL overflows where trainer and
    rollouts are far apart.
    """
    steps = [(row.get(key), row.get(RESPONSE_TOKENS)) for row in rows]
    known = [(value, tokens) for value, tokens in steps if value is not None and tokens is not None]
    if not known or len(known) < len(steps):
        return None
    return sum(value * tokens for value, tokens in known) / sum(tokens for _, tokens in known)
