"""Benchmark records in two files; `python -m analysis.benchmark_records` puts new ones in.

    records.jsonl   a line a record: its name, then what NAME.json had
    batches.csv.gz  the batches of sequences of parity records, each with its record's name

A program writes NAME.json, and NAME.csv.gz beside it. As long as it is there it counts, not a line
of its name. A record is named by the path of its own file, there or not.
"""

import argparse
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pandas as pd

from experiments.study.schema import ROOT
from experiments.support.cli import run_cli
from experiments.support.json_files import (
    Json,
    Parsed,
    check_model,
    parse_object,
    read_bytes,
    read_json,
    read_model,
    write_jsonl,
)

RECORDS, BATCHES = "records.jsonl", "batches.csv.gz"
# files of their own: what others look up by name
KEPT = ("zero_mismatch_*", "serving_exact_*", "main_job_cpu.json")
HINT = "run the benchmark of that name"


def record_paths(folder: Path, pattern: str) -> list[Path]:
    """The records whose files' names fit, ascending."""
    names = {it.name for it in folder.glob(pattern)}
    names |= {it for name in _folded(folder) if fnmatch(it := f"{name}.json", pattern)}
    return sorted(folder / it for it in names)


def read_record(path: Path, kind: type[Parsed]) -> Parsed:
    """A benchmark's record; ValueError names a missing or damaged one."""
    found = None if path.is_file() else _folded(path.parent).get(path.stem)
    return check_model(found, str(path), kind, HINT) if found else read_model(path, kind, HINT)


def read_batches(path: Path) -> pd.DataFrame:
    """The batches of a parity record."""
    own = path.with_suffix(".csv.gz")
    if own.is_file():
        return pd.read_csv(own)
    batches = pd.read_csv(path.with_name(BATCHES))
    return batches[batches["record"] == path.stem]


def _folded(folder: Path) -> Mapping[str, Json]:
    path = folder / RECORDS
    return _parsed(path, read_bytes(path, HINT)) if path.is_file() else {}


@cache
def _parsed(path: Path, content: bytes) -> Mapping[str, Json]:
    lines = enumerate(content.splitlines(), start=1)
    found = (parse_object(line, f"{path}: line {number}", HINT) for number, line in lines)
    return {str(it.pop("name", "")): it for it in found}


def fold(folder: Path) -> None:
    """Puts all records that are rows into the two files."""
    records, batches = dict(_folded(folder)), []
    if (folder / BATCHES).is_file():
        batches.append(pd.read_csv(folder / BATCHES))
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not {"rows", "comparisons"} & content.keys() or any(map(path.match, KEPT)):
            continue
        records[path.stem] = content
        own = path.with_suffix(".csv.gz")
        if own.is_file():
            batches = [it[it["record"] != path.stem] for it in batches]
            batches.append(pd.read_csv(own).assign(record=path.stem))
            own.unlink()
        path.unlink()
    write_jsonl(folder / RECORDS, ({"name": it, **records[it]} for it in sorted(records)))
    if batches:
        mtime = {"method": "gzip", "mtime": 0}
        pd.concat(batches).to_csv(folder / BATCHES, index=False, compression=mtime)


def main() -> None:
    """Folds the records of a folder."""
    parser = argparse.ArgumentParser(description="Put benchmark records into one file.")
    default = ROOT / "experiments" / "records" / "benchmarks"
    parser.add_argument("folder", type=Path, nargs="?", default=default)
    fold(parser.parse_args().folder)


if __name__ == "__main__":
    run_cli(main)
