"""SIGTERM and SIGINT while training: finish the step, save, leave."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class TrainingInterrupted(SystemExit):
    """Training stopped by a signal after a whole step was saved; `code` is 128 + the signal's number, as shells have it."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(128 + number)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Seen:
    """The signal received so far, as a number; 0 = none."""

    received: int = 0


@contextlib.contextmanager
def watch() -> Iterator[Seen]:
    """Note SIGTERM and SIGINT instead of dying; a second one acts as it always did. Does nothing outside the main thread."""
    seen = Seen()
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: object) -> None:
        seen.received = number
        signal.signal(number, before[number])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
