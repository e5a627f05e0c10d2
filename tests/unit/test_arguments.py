"""Numbers on command lines: what is taken, and what is refused."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from experiments.study.schema import Study
from qat_core.arguments import LARGEST_SEED, positive_float, positive_int, study_seed


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (positive_int, "1", 1),
        (positive_float, "1e-9", 1e-9),
        (study_seed, "0", 0),
        (study_seed, str(LARGEST_SEED), LARGEST_SEED),
    ],
)
def test_a_number_is_taken(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (positive_int, ["0", "-1", "1.5", "nan", "inf", "", "x", "9" * 5000]),
        (positive_float, ["0", "-1", "nan", "inf", "", "x"]),
        (study_seed, ["-1", str(LARGEST_SEED + 1), "1.5", "nan", ""]),
    ],
)
def test_what_cannot_be_is_refused_with_what_is_needed(
    parse: Callable[[str], float], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=r": needs a (whole )?number"):
            parse(text)


def test_a_seed_is_one_that_a_study_may_have() -> None:
    largest = Study.model_json_schema()["properties"]["seeds"]["items"]["exclusiveMaximum"] - 1
    assert largest == LARGEST_SEED
