"""Command line of packed checkpoints.

python -m qat_core.checkpoint convert SRC DST --recipe full --format compressed-tensors
python -m qat_core.checkpoint verify DIR
"""

import argparse
import sys
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from qat_core.checkpoint.conversion import RANDOM_EXPERTS
from qat_core.checkpoint.read import read_checkpoint
from qat_core.checkpoint.write import convert
from qat_core.nvfp4 import PackedTensor
from qat_core.options import BlockScaleMethod, CheckpointFormat, ScalePolicy
from qat_core.planning.recipe import Recipe

RECIPES = {"full": Recipe.full, "ffn": Recipe.ffn}


def main() -> None:
    """Converts or verifies; a mistake of the user is one line on stderr and exit code 2."""
    arguments = _parser().parse_args()
    try:
        if arguments.command == "verify":
            _verify(arguments.folder)
        else:
            recipe = _recipe(arguments)
            print(convert(arguments.source, arguments.destination, recipe, arguments.format, True))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _verify(folder: Path) -> None:
    num_weights, packed_experts = 0, False
    for name, weight in read_checkpoint(folder):
        num_weights += 1
        packed_experts |= isinstance(weight, PackedTensor) and ".experts." in name
    print(f"{folder}: {num_weights} weights, all as recorded")
    if packed_experts:
        print(RANDOM_EXPERTS)


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m qat_core.checkpoint")
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="check a packed checkpoint, every byte of it")
    verify.add_argument("folder", type=Path)
    pack = commands.add_parser("convert", help="pack a BF16 checkpoint folder into a new one")
    pack.add_argument("source", type=Path)
    pack.add_argument("destination", type=Path)
    pack.add_argument("--recipe", choices=RECIPES, default="full")
    pack.add_argument("--format", choices=get_args(CheckpointFormat), default="compressed-tensors")
    pack.add_argument("--scale", choices=get_args(ScalePolicy), default="pow2")
    pack.add_argument("--block-scale", choices=get_args(BlockScaleMethod), default="max")
    pack.add_argument("--ignore", nargs="*", default=[], metavar="PATTERN")
    return parser


if __name__ == "__main__":
    main()
