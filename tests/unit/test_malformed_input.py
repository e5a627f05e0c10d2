"""Whatever is malformed gets at most a few clear lines that name the file, never a traceback."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.malformed.kind import try_once
from tests.malformed.kinds import KINDS

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=KINDS)
def kind_and_original(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    original = tmp_path_factory.mktemp("original")
    KINDS[request.param].make(original)
    return request.param, original


def test_the_original_is_accepted(kind_and_original: tuple[str, Path], tmp_path: Path) -> None:
    name, original = kind_and_original
    kind = replace(KINDS[name], damage=lambda folder, random: None)
    assert try_once(kind, original, tmp_path / "copy", Random(0)) == ("accepted", "")


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_malformed_input_is_accepted_or_named(
    kind_and_original: tuple[str, Path], tmp_path: Path, seed: int
) -> None:
    name, original = kind_and_original
    outcome, said = try_once(KINDS[name], original, tmp_path / "copy", Random(seed))
    assert outcome in ("accepted", "one line", "a line per error"), said
