"""Prompts of a file as token ids: one a line, plain text or JSON."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

KEYS = ("prompt", "input")


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, limit: int) -> list[list[int]]:
    """The first `limit` prompts of a file.

    A line of a `.jsonl` file is an object that holds the prompt under `prompt` (or `input`, as in
    verl's dumped rollouts): text, or chat messages for the tokenizer's template. Any other file
    holds a text a line.

    Raises:
        ValueError: the file is missing or empty, or a line holds no prompt.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a file with one prompt a line")
    try:
        numbered = enumerate(path.read_text(encoding="utf-8").split("\n"), start=1)
        lines = [(number, line) for number, line in numbered if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}; write it as UTF-8") from None
    if not lines:
        raise ValueError(f"{path}: holds no prompts; write one a line")
    templated = partial(
        tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    prompts = []
    for number, line in lines[:limit]:
        where = f"{path}, line {number}"
        prompt = _prompt(line, where, path.suffix == ".jsonl")
        try:
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else templated(prompt)
        except Exception as error:  # of the tokenizer, or of its template for messages
            raise ValueError(f"{where}: cannot be made tokens: {error}; correct it") from error
        if not ids:
            raise ValueError(f"{where}: has no tokens; remove it")
        prompts.append(ids)
    return prompts


def _prompt(line: str, where: str, is_json: bool) -> Any:
    if not is_json:
        return line
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); remove the damaged line") from None
    for key in KEYS:
        if isinstance(row, dict) and isinstance(row.get(key), str | list) and row[key]:
            return row[key]
    raise ValueError(f"{where}: holds no text and no messages under {' or '.join(KEYS)}")
