"""How far the work is: a bar on a terminal, plain lines elsewhere, both on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

_SECONDS = 10.0  # between two plain lines: a log of hours stays readable


class PrepareProgress:
    """Counts documents, tokens and characters, and shows them.

    Args:
        size: bytes that the source holds on the disk; None where nobody knows.
        shown: False prints nothing at all.
    """

    def __init__(self, size: int | None, *, shown: bool) -> None:
        self._size, self._shown = size, shown
        self._documents = self._tokens = self._characters = 0
        self._begun = self._printed = time.monotonic()
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console) if shown and console.is_terminal else None
        self._task = self._bar.add_task("prepare", total=size) if self._bar else None

    def __enter__(self) -> PrepareProgress:
        """Show the bar."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take the bar away; after success say what was done."""
        if self._bar:
            self._bar.stop()
        if kind is None and self._documents:
            self.say(self._text())

    def say(self, line: str) -> None:
        """Print a line (above the bar, if there is one)."""
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False)
        elif self._shown:
            print(line, file=sys.stderr, flush=True)

    def update(self, consumed: int, documents: int, tokens: int, characters: int) -> None:
        """Add a batch that is done; `consumed` is how many bytes of the source are read in all."""
        self._documents, self._tokens = self._documents + documents, self._tokens + tokens
        self._characters += characters
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=consumed, description=self._text())
        elif time.monotonic() - self._printed >= _SECONDS:
            self._printed = time.monotonic()
            self.say(f"{self._text()}{f', {100 * consumed // self._size}% read' if self._size else ''}")

    def _text(self) -> str:
        megabytes, seconds = self._characters / 1e6, max(time.monotonic() - self._begun, 1e-9)
        return (
            f"prepare: {self._documents} documents, {self._tokens / 1e6:.1f}M tokens, "
            f"{megabytes:.1f}M characters ({megabytes / seconds:.1f}M/s)"
        )
