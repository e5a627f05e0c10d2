"""Signals held back while something must not be interrupted."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block has ended; for the main thread.

    Raised inside a write to a database they would spoil its session, or be taken for its error.
    """
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in STOP_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
