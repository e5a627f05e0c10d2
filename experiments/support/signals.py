"""Moments at which a run may not be interrupted."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interruption() -> Iterator[None]:
    """Holds Ctrl-C and SIGTERM back until the block has ended; for the main thread.

    Raised inside a write to a database they would spoil its session, or be taken for its error.
    """
    received: list[int] = []
    former = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in INTERRUPTIONS
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
