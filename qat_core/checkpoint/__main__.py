"""Command line of packed checkpoints, which `qat-core` has too.

python -m qat_core.checkpoint explain SRC --recipe full
python -m qat_core.checkpoint convert SRC DST --recipe full --format compressed-tensors
python -m qat_core.checkpoint verify DIR

torch is imported by what a command does, not before: help and mistakes come at once.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from qat_core.options import BlockScaleMethod, CheckpointFormat, ScalePolicy
from qat_core.planning.recipe import Recipe

RECIPES = {"full": Recipe.full, "ffn": Recipe.ffn}


def main(
    words: Sequence[str] | None = None, program: str = "python -m qat_core.checkpoint"
) -> None:
    """Runs a command; a mistake of the user is one line on stderr and exit code 2."""
    arguments = _parser(program).parse_args(words)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _explain(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    from qat_core.checkpoint.architecture import meta_model
    from qat_core.planning.explanation import explain

    explained = explain(meta_model(arguments.source), recipe)
    print(explained)
    if "\nerror: " in explained:
        sys.exit(2)


def _convert(arguments: argparse.Namespace) -> None:
    recipe = _recipe(arguments)
    from qat_core.checkpoint.write import convert

    print(convert(arguments.source, arguments.destination, recipe, arguments.format, True))


def _verify(arguments: argparse.Namespace) -> None:
    from qat_core.checkpoint.read import verify

    print(verify(arguments.folder))


def _recipe(arguments: argparse.Namespace) -> Recipe:
    try:
        return RECIPES[arguments.recipe](
            scale_policy=arguments.scale,
            block_scale_method=arguments.block_scale,
            ignore=tuple(arguments.ignore),
        )
    except ValidationError as error:  # of a pattern: the other options have choices
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"--{first}; correct it") from None


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Packed NVFP4 checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, what: str, run: object, *parents: argparse.ArgumentParser) -> None:
        added = commands.add_parser(name, help=what, description=what, parents=parents)
        added.set_defaults(run=run)

    recipe, destination, packed = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    add = recipe.add_argument
    add("source", type=Path, help="folder of a BF16 or FP32 checkpoint; explain reads config.json")
    add(
        "--recipe",
        choices=RECIPES,
        default="full",
        help="ffn leaves attention in BF16 (%(default)s)",
    )
    add(
        "--scale",
        choices=get_args(ScalePolicy),
        default="pow2",
        help="global scale: largest power of two that fits, or from amax (%(default)s)",
    )
    add(
        "--block-scale",
        choices=get_args(BlockScaleMethod),
        default="max",
        help="scale of 16 weights: from their maximum, or searched for the least squared error "
        "(%(default)s)",
    )
    add(
        "--ignore",
        nargs="*",
        default=[],
        metavar="PATTERN",
        help="modules left in BF16: a part of their name, or re: and a regex of its start",
    )
    add = destination.add_argument
    add("destination", type=Path, help="new folder; must not exist")
    add(
        "--format",
        choices=get_args(CheckpointFormat),
        default="compressed-tensors",
        help="how packed weights are stored; vLLM reads both (%(default)s)",
    )
    packed.add_argument("folder", type=Path, help="packed checkpoint")
    command("explain", "show what a recipe would pack, what not, and why", _explain, recipe)
    command("convert", "pack a checkpoint folder into a new one", _convert, recipe, destination)
    command("verify", "check a packed checkpoint, every byte of it", _verify, packed)
    return parser


if __name__ == "__main__":
    main()
