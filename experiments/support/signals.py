"""Signals: how they end a program, and how they wait while something must not be interrupted."""

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SET_DEATH_SIGNAL = 1  # prctl(2)
_LIBC = ctypes.CDLL(None)


def raise_stop_signals() -> None:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt from now on, so that programs clean up."""
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(signal_number).name)


def end_with_parent() -> None:
    """Called in a child: it gets SIGTERM when its parent ends, however that ends."""
    _LIBC.prctl(SET_DEATH_SIGNAL, signal.SIGTERM)


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
