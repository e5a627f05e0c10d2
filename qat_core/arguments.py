"""Numbers on command lines: types for argparse that refuse what cannot be, such as nan.

Here and not in `experiments.support.cli`, because programs of the library take numbers too.
"""

from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import TypeVar

Number = TypeVar("Number", int, float)
LARGEST_SEED = 2**31 - 1  # as in a study


def positive_int(text: str) -> int:
    """A count: 1 or more."""
    return _parse(int, text, lambda value: value > 0, "a whole number above 0")


def study_seed(text: str) -> int:
    """A seed as a study may have it."""
    return _parse(
        int, text, lambda value: 0 <= value <= LARGEST_SEED, f"a whole number, 0 to {LARGEST_SEED}"
    )


def positive_float(text: str) -> float:
    """A finite number above 0."""
    return _parse(float, text, lambda value: 0 < value < inf, "a number above 0")


def _parse(
    kind: Callable[[str], Number], text: str, is_right: Callable[[Number], bool], needs: str
) -> Number:
    with suppress(ValueError):
        if is_right(value := kind(text)):
            return value
    raise ArgumentTypeError(f"{text}: needs {needs}")
