"""Signals wait for the end of what must not be interrupted."""

import signal
from collections.abc import Iterator

import pytest

from experiments.support.signals import INTERRUPTIONS, deferred_interruption


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Signals that reach the handlers in force outside."""
    seen: list[int] = []
    former = {n: signal.signal(n, lambda n, frame: seen.append(n)) for n in INTERRUPTIONS}
    yield seen
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", INTERRUPTIONS, ids=["ctrl-c", "sigterm"])
def test_a_signal_arrives_after_the_block(handlers: list[int], number: int) -> None:
    with deferred_interruption():
        signal.raise_signal(number)
        assert handlers == []
    assert handlers == [number]
    signal.raise_signal(number)
    assert handlers == [number, number], "the former handlers are back"


def test_it_arrives_also_when_the_block_fails(handlers: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), deferred_interruption():
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert handlers == [signal.SIGTERM]
