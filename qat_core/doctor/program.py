"""What the doctor's command does: examine a checkpoint, or judge a recorded verl run."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from qat_core.bf16_on_cpu import multiply_bf16_in_fp32
from qat_core.doctor.examine import Case, examine, random_prompts
from qat_core.doctor.prompts import read_prompts
from qat_core.doctor.report import show
from qat_core.doctor.sampling import Sampling
from qat_core.doctor.signs import judge
from qat_core.doctor.verl_run import Judgement, read_run
from qat_core.planning.recipe import Recipe
from qat_core.yaml_damage import YAML_DAMAGE

OFF = -1  # top-k in vLLM and verl
STYLES = {"fault": "bold red", "warning": "yellow", "none": "", "not recorded": "dim"}


@contextmanager
def only_result_on_stdout() -> Iterator[None]:
    """Inside, what engines and their libraries log to stdout goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def run(arguments: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Whether nothing is at fault, and everything for JSON."""
    logging.disable_progress_bar()
    console = Console(stderr=arguments.json)
    if arguments.verl is not None:
        judged = judge(read_run(arguments.verl), arguments.band)
        show_run(judged, console)
        return judged.is_healthy, judged.as_dict()
    if arguments.exact:
        return _compare_exact(arguments, console)
    multiply_bf16_in_fp32()
    diagnosis = examine(_case(arguments))
    show(diagnosis, console)
    return diagnosis.is_healthy, diagnosis.as_dict()


def _compare_exact(arguments: argparse.Namespace, console: Console) -> tuple[bool, dict[str, Any]]:
    from qat_core.doctor.exact import compare_exact

    if arguments.device != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            "--exact: kernels of a GPU are exact; use --device cuda, on a machine with one"
        )
    found = compare_exact(
        _folder(arguments),
        read_recipe(arguments.recipe, "--recipe"),
        _prompts(arguments),
        arguments.max_new_tokens,
        arguments.seed,
    )
    console.print(str(found))
    return not found.unequal, asdict(found)


def show_run(judged: Judgement, console: Console) -> None:
    """Prints all signs, then what to do about those that are faults."""
    table = Table("sign", "evidence", "verdict")
    for sign in judged.signs:
        cells = (sign.title, sign.evidence, sign.verdict)
        table.add_row(*map(Text, cells), style=STYLES[sign.verdict])
    console.print(table)
    for sign in judged.signs:
        if sign.advice:
            console.print(Text(f"{sign.title}: {sign.advice}", style=STYLES[sign.verdict]))
    if judged.is_healthy:
        console.print(f"No fault found in {judged.num_steps} steps.")


def _folder(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.checkpoint
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'}: missing; name the folder of a checkpoint")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda: there is no CUDA GPU here; use cpu")
    return folder


def _case(arguments: argparse.Namespace) -> Case:
    folder = _folder(arguments)
    rolled_out = read_recipe(arguments.recipe, "--recipe")
    trained = arguments.trained
    return Case(
        checkpoint=folder,
        prompts=_prompts(arguments),
        rolled_out=rolled_out,
        trained=rolled_out if trained is None else read_recipe(trained, "--trained"),
        served=arguments.served,
        previous=arguments.previous,
        engine=arguments.engine,
        device=arguments.device,
        max_new_tokens=arguments.max_new_tokens,
        sampling=Sampling(
            arguments.temperature,
            arguments.top_p,
            0 if arguments.top_k == OFF else arguments.top_k,
            arguments.repetition_penalty,
        ),
        micro_batch=arguments.micro_batch,
        seed=arguments.seed,
    )


def _prompts(arguments: argparse.Namespace) -> list[list[int]]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
        known = set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)
        size = AutoConfig.from_pretrained(arguments.checkpoint).get_text_config().vocab_size
    except Exception as error:  # of any kind: it reads what a user names
        raise ValueError(
            f"{arguments.checkpoint}: its tokenizer cannot be loaded: {error!r}"
        ) from error
    if not known:
        raise ValueError(f"{arguments.checkpoint}: no tokens; save the tokenizer there too")
    if arguments.prompts is None:
        return random_prompts(known & set(range(size)), arguments.sequences, arguments.seed)
    return read_prompts(arguments.prompts, tokenizer, arguments.sequences)


def read_recipe(name: str, option: str) -> Recipe | None:
    """The recipe of a name or a YAML file; ValueError names the option and the file."""
    if name == "none":
        return None
    if name in ("full", "ffn"):
        return Recipe.full() if name == "full" else Recipe.ffn()
    try:
        return Recipe(**yaml.safe_load(Path(name).read_bytes()))
    except FileNotFoundError:
        raise ValueError(f"{option}: {name}: use none, full, ffn or a YAML file") from None
    except (ValidationError, TypeError, *YAML_DAMAGE) as error:
        raise ValueError(f"{option}: {name}: {' '.join(str(error).split())}") from None
