"""Questions in files: verl's parquet rows, or JSON lines of a question and its answer.

Read with pyarrow. The library `datasets` would copy each file into a cache of its own first, and
leave what is here to do: rows checked one by one, checksums, a question an answer.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError

from experiments.rl.tasks import Question

# what DAPO-Math-17k and its AIME 2024 wrap every problem in
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
    '\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
)

Text = Annotated[str, Field(min_length=1, strict=True)]
ModelT = TypeVar("ModelT", bound=BaseModel)


class Message(BaseModel):
    """One message of a conversation."""

    role: Literal["user"]
    content: Text


class RewardModel(BaseModel):
    """What verl hands to the reward function."""

    ground_truth: Text


class Row(BaseModel):
    """The columns of verl's data sets that make a question; there may be others."""

    prompt: list[Message] = Field(min_length=1, max_length=1)
    reward_model: RewardModel


class Line(BaseModel):
    """A line of AIME 2025 on the hub."""

    question: Text
    answer: Text


class Unique(NamedTuple):
    """Questions that differ, and how many rows were left out."""

    questions: list[Question]
    repeated: int  # rows that say again what an earlier one says
    contradictory: int  # questions with more than one answer, all left out


def read_questions(path: Path) -> Iterator[Question]:
    """The questions of a `.parquet` file of verl or a `.jsonl` file, in order."""
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path}: neither .parquet nor .jsonl; convert it to one of them")
    questions = readers[path.suffix](path)
    first = next(questions, None)
    if first is None:
        raise ValueError(f"{path}: no rows; take a file that has some")
    yield first
    yield from questions


def drop_repeated(questions: Iterable[Question]) -> Unique:
    """Each prompt once; the prompts of DAPO-Math-17k are on the hub about a hundred times each."""
    rows = Counter(questions)
    answers = Counter(question.prompt for question in rows)
    kept = [question for question in rows if answers[question.prompt] == 1]
    contradictory = sum(count > 1 for count in answers.values())
    return Unique(kept, rows.total() - len(rows), contradictory)


def _read_parquet(path: Path) -> Iterator[Question]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path}: not a parquet file: {error}; fetch it again") from error
    columns = list(Row.model_fields)
    for column in columns:
        if column not in file.schema_arrow.names:
            raise ValueError(f"{path}: column {column}: missing; take a file in verl's format")
    batches = file.iter_batches(columns=columns)
    rows = chain.from_iterable(batch.to_pylist() for batch in batches)
    for number, content in enumerate(rows, start=1):
        row = _validate(Row, content, f"{path}: row {number}: column ")
        yield Question(row.prompt[0].content, row.reward_model.ground_truth)


def _read_jsonl(path: Path) -> Iterator[Question]:
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:  # of the JSON, or of its encoding
            raise ValueError(f"{path}: line {number}: not JSON: {error}; fetch it again") from error
        line = _validate(Line, content, f"{path}: line {number}: ")
        yield Question(DAPO_PROMPT.format(problem=line.question), line.answer)


def _validate(model: type[ModelT], content: Any, where: str) -> ModelT:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}{key}: {first['msg']}; take a file in verl's format") from None
