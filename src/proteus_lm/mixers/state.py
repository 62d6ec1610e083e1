"""States as trees: nested (named) tuples of tensors, one row a sequence. What holds for the state of every mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_state(function: Callable[..., Tensor], *states: Any) -> Any:
    """`function` over the tensors of states of one structure: nested (named) tuples of tensors, one row a sequence."""
    if isinstance(states[0], Tensor):
        return function(*states)
    parts = [map_state(function, *part) for part in zip(*states)]
    return type(states[0])(*parts) if hasattr(states[0], "_fields") else tuple(parts)


def named_tensors(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a state by their paths, in order: field names, and numbers from 0 in plain tuples ("memory.weights.0")."""
    if isinstance(state, Tensor):
        return {prefix.removesuffix("."): state}
    names = getattr(state, "_fields", range(len(state)))
    found: dict[str, Tensor] = {}
    for name, part in zip(names, state, strict=True):
        found |= named_tensors(part, f"{prefix}{name}.")
    return found


def named_state(tensors: Mapping[str, Tensor], like: Any) -> Any:
    """The inverse of `named_tensors`, of the structure of `like`.

    Raises:
        ValueError: for other names than the structure's.
    """
    wanted = list(named_tensors(like))
    if set(wanted) != set(tensors):
        raise ValueError(f"a state of tensors {', '.join(sorted(tensors))}; the state of this mixer has {', '.join(wanted)}")
    rest = iter(wanted)
    return map_state(lambda _: tensors[next(rest)], like)
