"""The record of a study: all that its runs left, in a few files of one folder.

    manifests.jsonl      a line a run: its manifest
    metrics.parquet      a row a run and step
    evaluations.parquet  a row a run and offline evaluation, mappings as JSON; if there is any
    drift.parquet        a row a run, weight and observed step; likewise

A run of a record is named RECORD/RUN, as its folder among results would be: who reads a run's file
asks `record_of` first. In a table NaN is undefined; null is what a run has no value of.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.support.json_files import Json, parse_object, read_bytes, write_jsonl

if TYPE_CHECKING:  # half a second of every program's start
    import pandas as pd

MANIFESTS, METRICS = "manifests.jsonl", "metrics.parquet"
EVALUATIONS, DRIFT = "evaluations.parquet", "drift.parquet"
FILES = {"manifest.json": MANIFESTS, "metrics.jsonl": METRICS, "eval.json": EVALUATIONS}
FILES |= {"drift.jsonl": DRIFT}  # by the file that a run has in results
HINT = "restore it, or record the study again"
RUN, STEP, OF_JSON = "run", "step", ("settings", "verifier")
TYPES = {RUN: pa.string(), STEP: pa.int64(), "kind": pa.string()}  # all else is a number


class RecordedRun(NamedTuple):
    """What a record holds of a run."""

    manifest: Json
    metrics: "pd.DataFrame"
    evaluations: Sequence[Json]  # all of one form, as eval.json has them
    drift: "pd.DataFrame | None"  # None if it was not watched


class Record:
    """The runs in a record's folder; ValueError names a file that is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tables = dict[str, dict[str, pa.Table]]()

    @property
    def runs(self) -> tuple[str, ...]:
        """Their ids, ascending."""
        return tuple(sorted(self._manifests))

    def manifest(self, run: str) -> Json:
        """A run's manifest."""
        if run not in self._manifests:
            raise ValueError(f"{self.folder / MANIFESTS}: {run}: missing; {HINT}")
        return self._manifests[run]

    def has(self, file: str, run: str) -> bool:
        """Whether a run has what a file of FILES holds."""
        if FILES[file] == MANIFESTS:
            return run in self._manifests
        return (self.folder / FILES[file]).is_file() and run in self._table(FILES[file])

    def rows(self, file: str, run: str) -> pa.Table:
        """What another file than the manifest holds of a run, with the columns that it has."""
        found = self._table(FILES[file]).get(run)
        if found is None:
            raise ValueError(f"{self.folder / FILES[file]}: {run}: missing; {HINT}")
        return found

    def evaluations(self, run: str) -> list[Json]:
        """As eval.json has them."""
        rows: list[Json] = self.rows("eval.json", run).to_pylist()
        for row, key in product(rows, OF_JSON):
            if row.get(key):
                row[key] = parse_object(row[key], f"{self.folder / EVALUATIONS}: {key}", HINT)
        return rows

    @cached_property
    def _manifests(self) -> dict[str, Json]:
        path, found = self.folder / MANIFESTS, dict[str, Json]()
        for number, line in enumerate(read_bytes(path, HINT).splitlines(), start=1):
            manifest = parse_object(line, f"{path}: line {number}", HINT)
            run = manifest.get(RUN)
            if not isinstance(run, str) or run in found:
                raise ValueError(f"{path}: line {number}: {RUN}: {run!r} is no new name; {HINT}")
            found[run] = manifest
        return found

    def _table(self, file: str) -> dict[str, pa.Table]:
        if file not in self._tables:
            self._tables[file] = _read_table(self.folder / file)
        return self._tables[file]


def record_of(run_dir: Path) -> Record | None:
    """The record that a run of this name is in, None if it can only have a folder of its own."""
    return open_record(run_dir.parent)


def open_record(folder: Path) -> Record | None:
    """The record in a folder, None if it is none."""
    states = [_state(f"{folder}/{name}") for name in FILES.values()]  # asked often: no Path
    return _opened(folder, *states) if states[0] else None


def _state(path: str) -> tuple[int, int, int] | None:
    """What changes with a file's content; None if it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=32)  # more than there are: pages about all of them read each once
def _opened(folder: Path, *states: tuple[int, int, int] | None) -> Record:
    return Record(folder)


def has_file(run_dir: Path, file: str) -> bool:
    """Whether a run, of results or of a record, has what a file of FILES holds."""
    record = record_of(run_dir)
    return record.has(file, run_dir.name) if record else (run_dir / file).is_file()


def file_of(run_dir: Path, file: str) -> str:
    """What an error calls a run's file."""
    recorded = f"{run_dir.parent / FILES[file]}: {run_dir.name}"
    return recorded if record_of(run_dir) else str(run_dir / file)


def write_record(folder: Path, runs: Mapping[str, RecordedRun]) -> None:
    """Writes the files of a record; the same runs give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    ordered = {run: runs[run] for run in sorted(runs)}
    write_jsonl(folder / MANIFESTS, (it.manifest for it in ordered.values()))
    _write_table(folder / METRICS, _table({run: it.metrics for run, it in ordered.items()}))
    if drift := {run: it.drift for run, it in ordered.items() if it.drift is not None}:
        _write_table(folder / DRIFT, _table(drift))
    rows = [
        {RUN: run, **it, **{key: json.dumps(it[key]) for key in OF_JSON if it.get(key)}}
        for run, of_run in ordered.items()
        for it in of_run.evaluations
    ]
    if rows:
        table = pa.Table.from_pylist(rows)
        said = [field.name for field in table.schema if field.type != pa.null()]
        _write_table(folder / EVALUATIONS, table.select(said))


def _table(frames: "Mapping[str, pd.DataFrame]") -> pa.Table:
    """One table of all runs' rows."""
    names, parts = dict.fromkeys(str(it) for frame in frames.values() for it in frame), []
    for run, frame in frames.items():
        columns = {RUN: pa.array([run] * len(frame), pa.string())}
        for name in names:
            kind = TYPES.get(name, pa.float64())
            if name not in frame:
                columns[name] = pa.nulls(len(frame), kind)
            else:  # unlike pandas, Arrow tells NaN from null
                values = frame[name].to_numpy(None if name in TYPES else np.float64)
                columns[name] = pa.array(values, kind, from_pandas=False)
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _write_table(path: Path, table: pa.Table) -> None:
    numbers = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=19,
        use_dictionary=[name for name in table.schema.names if name not in numbers],
        # bytes of equal weight together: floats are a tenth smaller
        column_encoding=dict.fromkeys(numbers, "BYTE_STREAM_SPLIT"),
        write_page_checksum=True,
    )


def _read_table(path: Path) -> dict[str, pa.Table]:
    try:
        table = pq.read_table(path, page_checksum_verification=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing; {HINT}") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}; {HINT}") from None
    if missing := {RUN, STEP} - set(table.schema.names):
        raise ValueError(f"{path}: no column {min(missing)}; {HINT}")
    found, first = dict[str, pa.Table](), 0
    for run, its in groupby(table[RUN].to_pylist()):
        rows = table.slice(first, sum(1 for _ in its))
        if run in found:
            raise ValueError(f"{path}: {run}: rows of others between its own; {HINT}")
        there = [n for n in rows.schema.names if n != RUN and rows[n].null_count < len(rows)]
        found[run], first = rows.select(there), first + len(rows)
    return found
