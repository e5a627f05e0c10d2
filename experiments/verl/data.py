"""`python -m experiments.verl.data`: a study's problems as verl's parquet files, and data.json."""

import argparse
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.rl.config import TaskConfig
from experiments.rl.tasks import GENERATED_TASKS, Question, Split, make_problems
from experiments.runs.inputs import DATA_MANIFEST, data_digest
from experiments.runs.provenance import digest_file
from experiments.study.load import load_study
from experiments.support.cli import STUDY, run_cli
from experiments.support.folders import require_replaceable
from experiments.support.json_files import write_json
from experiments.verl.questions import drop_repeated, read_questions
from experiments.verl.sources import locate_sources

# verl/utils/dataset/rl_dataset.py and verl/experimental/reward_loop read these columns
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64()}),
    }
)
ROWS_AT_ONCE = 2**18  # DAPO-Math-17k as published has 1.8 million, which as objects fill a machine


class Part(NamedTuple):
    """Questions of one source, and what data.json says of them."""

    data_source: str
    questions: list[Question]
    origin: dict[str, Any]


def write_data(task: TaskConfig, out: Path) -> None:
    """Writes train.parquet, test.parquet and data.json into a folder, all of them or none."""
    require_replaceable(out)
    test = list(_parts(task, "test"))
    held_out = {question.prompt for part in test for question in part.questions}
    train = list(_parts(task, "train"))
    if task.train_rows == "once":
        train = [_without(part, held_out) for part in train]
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    splits: dict[Split, list[Part]] = {"train": train, "test": test}
    described: dict[str, Any] = {
        split: _write(parts, split, partial) for split, parts in splits.items()
    }
    write_json(partial / DATA_MANIFEST, described | {"settings": data_digest(task)})
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def _parts(task: TaskConfig, split: Split) -> Iterator[Part]:
    if task.name in GENERATED_TASKS:
        origin = {"generator": "experiments.rl.tasks"}
        yield Part(task.name, list(make_problems(task, split)), origin)
        return
    for source in locate_sources(task, split):
        read = read_questions(source.path)
        if split == "train" and task.train_rows == "published":
            yield Part(source.name, list(read), source.origin)
            continue
        questions, repeated, contradictory = drop_repeated(read)
        left_out = {"repeated_rows": repeated, "contradictory_prompts": contradictory}
        yield Part(source.name, questions, source.origin | left_out)


def _without(part: Part, held_out: set[str]) -> Part:
    kept = [question for question in part.questions if question.prompt not in held_out]
    left_out = {"held_out_prompts": len(part.questions) - len(kept)}
    return part._replace(questions=kept, origin=part.origin | left_out)


def _write(parts: list[Part], split: Split, folder: Path) -> dict[str, Any]:
    """Writes a split; returns what data.json says of it."""
    path = folder / f"{split}.parquet"
    labelled = [(part.data_source, question) for part in parts for question in part.questions]
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for start in range(0, len(labelled), ROWS_AT_ONCE):
            some = enumerate(labelled[start : start + ROWS_AT_ONCE], start)
            rows = [_row(source, question, split, i) for i, (source, question) in some]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    sources = [
        {"data_source": part.data_source, "rows": len(part.questions), **part.origin}
        for part in parts
    ]
    return {"rows": len(labelled), "sha256": digest_file(path), "sources": sources}


def _row(data_source: str, question: Question, split: Split, index: int) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": question.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    """Parses the command line and writes a study's data."""
    parser = argparse.ArgumentParser(description=__doc__, parents=[STUDY])
    parser.add_argument("--out", type=Path, required=True, help="folder, replaced as a whole")
    args = parser.parse_args()
    write_data(load_study(args.study).task, args.out)


if __name__ == "__main__":
    run_cli(main)
