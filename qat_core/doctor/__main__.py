"""Is a train/rollout mismatch normal or a fault, and where does it come from?

    python -m qat_core.doctor CHECKPOINT --recipe full --prompts prompts.txt
    python -m qat_core.doctor --verl FOLDER

Exit code 0: nothing at fault; 1: a fault was named, or the mismatch is above the band of BF16 and
more than the model's rounding explains; 2: a mistake in the command, in one line.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from pydantic import ValidationError
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from qat_core.arguments import positive_int, study_seed
from qat_core.bf16_on_cpu import multiply_bf16_in_fp32
from qat_core.doctor.diagnosis import BANDS
from qat_core.doctor.examine import Case, examine, random_prompts
from qat_core.doctor.prompts import read_prompts
from qat_core.doctor.report import show
from qat_core.doctor.sampling import Sampling
from qat_core.doctor.signs import judge
from qat_core.doctor.verl_report import show_run
from qat_core.doctor.verl_run import read_run
from qat_core.planning.recipe import Recipe
from qat_core.rollout.start import EngineKind
from qat_core.yaml_damage import YAML_DAMAGE

SAMPLING = Sampling()
OFF = -1  # top-k in vLLM and verl
OF_RUNS = {"verl", "band", "json"}  # what a recorded run is judged by; of a checkpoint no band


def main() -> None:
    """Prints the diagnosis; see the module for the exit codes."""
    parser = _parser()
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    try:
        _require_effect(parser, arguments)
        with _only_result_on_stdout() if arguments.json else nullcontext():
            is_healthy, result = _run(arguments)
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    if arguments.json:
        print(json.dumps(result, indent=1))
    sys.exit(0 if is_healthy else 1)


def _require_effect(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """ValueError for a command with nothing to look at, or with options that change nothing."""
    if (arguments.checkpoint is None) == (arguments.verl is None):
        raise ValueError("name a CHECKPOINT, or a recorded run with --verl FOLDER")
    # argparse leaves what is not on the command line as it is
    unset = argparse.Namespace(**dict.fromkeys(vars(arguments)))
    given = {
        name for name, it in vars(parser.parse_args(namespace=unset)).items() if it is not None
    }
    is_run = arguments.verl is not None
    idle = given - OF_RUNS if is_run else given & (OF_RUNS - {"json"})
    if idle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(idle))
        what = "a recorded run (--verl)" if is_run else "a checkpoint"
        raise ValueError(f"{options}: changes nothing for {what}; leave it out")


@contextmanager
def _only_result_on_stdout() -> Iterator[None]:
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


def _run(arguments: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Whether nothing is at fault, and everything for JSON."""
    console = Console(stderr=arguments.json)
    if arguments.verl is not None:
        judged = judge(read_run(arguments.verl), arguments.band)
        show_run(judged, console)
        return judged.is_healthy, judged.as_dict()
    multiply_bf16_in_fp32()
    diagnosis = examine(_case(arguments))
    show(diagnosis, console)
    return diagnosis.is_healthy, diagnosis.as_dict()


def _case(arguments: argparse.Namespace) -> Case:
    folder: Path = arguments.checkpoint
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'}: missing; name the folder of a checkpoint")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda: there is no CUDA GPU here; use cpu")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m qat_core.doctor",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, nargs="?", help="the trainer's BF16 checkpoint, with tokenizer")
    add("--verl", type=Path, metavar="FOLDER", help="judge a recorded verl run instead")
    add("--band", choices=sorted(BANDS), default="dense", help="of --verl: kind of model")
    add("--recipe", default="full", help="what rollouts hold in NVFP4: none, full, ffn or a file")
    add("--trained", help="what training rounds, likewise; by default the same")
    add("--served", type=Path, help="checkpoint that the engine serves, if not the trainer's")
    add("--previous", type=Path, help="checkpoint of the sync before, to tell what is stale")
    add("--engine", choices=get_args(EngineKind), default="eager")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--prompts", type=Path, help="one a line, or .jsonl; by default random tokens")
    add(
        "--sequences",
        type=positive_int,
        default=64,
        help="at most so many prompts, a response each",
    )
    add("--max-new-tokens", type=positive_int, default=64)
    add("--micro-batch", type=positive_int, default=8, help="sequences of a pass of the trainer")
    add("--temperature", type=float, default=SAMPLING.temperature)
    add("--top-p", type=float, default=SAMPLING.top_p)
    add("--top-k", type=int, default=SAMPLING.top_k, help="0 or -1 is off")
    add("--repetition-penalty", type=float, default=SAMPLING.repetition_penalty)
    add("--seed", type=study_seed, default=0)
    add("--json", action="store_true", help="JSON on stdout, the table on stderr")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    main()
