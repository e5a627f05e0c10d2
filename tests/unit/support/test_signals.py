"""Signals wait for the end of what must not be interrupted."""

import signal
from collections.abc import Iterator

import pytest

from experiments.support.signals import STOP_SIGNALS, deferred_signals


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """Signals that reach the handlers in force outside."""
    seen: list[int] = []
    previous = {n: signal.signal(n, lambda n, frame: seen.append(n)) for n in STOP_SIGNALS}
    yield seen
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=["ctrl-c", "sigterm"])
def test_a_signal_arrives_after_the_block(handlers: list[int], number: int) -> None:
    with deferred_signals():
        signal.raise_signal(number)
        assert handlers == []
    assert handlers == [number]
    signal.raise_signal(number)
    assert handlers == [number, number], "the previous handlers are back"


def test_it_arrives_also_when_the_block_fails(handlers: list[int]) -> None:
    with pytest.raises(ZeroDivisionError), deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert handlers == [signal.SIGTERM]
