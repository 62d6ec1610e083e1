"""What the commands share: the list of them, kinds of arguments, and how they speak. Nothing heavy is imported here."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import tyro

Positional = tyro.conf.Positional
Run = Annotated[Positional[Path], tyro.conf.arg(metavar="RUN")]
Device = Annotated[str, tyro.conf.arg(metavar="DEVICE")]
Overrides = Annotated[tuple[tuple[str, ...], ...], tyro.conf.arg(name="set", metavar="KEY=VALUE ..."), tyro.conf.UseAppendAction]
Lengths = Annotated[tuple[str, ...], tyro.conf.arg(metavar="LENGTH ...")]

_arguments: ContextVar[tuple[str, ...]] = ContextVar("arguments", default=())

app = tyro.extras.SubcommandApp()


def no_bars() -> None:
    """No progress bars of transformers, which counts files of a single model."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def say(text: str) -> None:
    """A line on standard error."""
    print(f"proteus: {text}", file=sys.stderr)


def print_json(value: Any) -> None:
    """A value on standard output."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def remember(arguments: Sequence[str]) -> None:
    """Keep the arguments of the command that begins, for `command_line`."""
    _arguments.set(tuple(arguments))


def command_line() -> str:
    """The command as it was given to `main`, for the record of what it makes."""
    return shlex.join(["proteus", *_arguments.get()])


def flat(groups: Iterable[Iterable[str]]) -> list[str]:
    """The items of an option that can be given several times with several values each."""
    return [item for group in groups for item in group]


def split_commas(items: Iterable[str]) -> list[str]:
    """Values given apart, or with commas between them."""
    return [name for item in items for name in item.split(",") if name]


def path_or_name(text: str) -> str:
    """A path with ~ resolved; a name on the hub as it is."""
    return str(Path(text).expanduser()) if text.startswith("~") else text


def choose_device(name: str) -> str:
    """The device to use. Raises ValueError for one that PyTorch does not know or this machine does not have."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # the device "meta" makes tensors, but holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(
            f"device {name!r} cannot be used here ({first}); give auto, cpu, or a device of `proteus doctor`"
        ) from error
    return name


def check_seed(seed: int) -> int:
    """A seed that every random generator takes. Raises ValueError for another."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be 0 to 2**63 - 1")
    return seed


def window_length(name: str, training: int) -> int | None:
    """Tokens of a window named 2x, 4096 or documents (None)."""
    if name == "documents":
        return None
    if name.isdecimal():
        return int(name)
    return multiple(name) * training


def multiple(name: str) -> int:
    """The number of 2x. Raises ValueError for anything else."""
    if not name.endswith("x") or not name[:-1].isdecimal() or int(name[:-1]) < 1:
        raise ValueError(f"context {name!r} is not a length; give 1x, 2x, ... for multiples of the training context")
    return int(name[:-1])


def token_counts(items: Iterable[str]) -> tuple[int, ...] | None:
    """Lengths such as 4096, 4K or 2M (K = 1024), rising; None for none.

    Raises:
        ValueError: for what is no length.
    """
    items, found = list(items), []
    names = split_commas(items)
    if items and not names:
        raise ValueError("no length is given; give 4096, 4K (4096 tokens) or 1M, or leave the option out")
    for name in names:
        digits, unit = (name[:-1], name[-1].upper()) if name[-1].upper() in "KM" else (name, "")
        if not digits.isdecimal() or int(digits) < 1:
            raise ValueError(f"length {name!r} is not a number of tokens; give 4096, 4K (4096 tokens) or 1M")
        found.append(int(digits) * {"": 1, "K": 1 << 10, "M": 1 << 20}[unit])
    return tuple(sorted(set(found))) or None


def progress_line(label: str) -> Callable[[int, int], None] | None:
    """A line on a terminal that counts tokens and is gone when they are done; None elsewhere."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\r" + " " * 60 + "\r" if done == total else ""
        print(f"\r{label}{done:,} of {total:,} tokens", end=end, file=sys.stderr, flush=True)

    return show
