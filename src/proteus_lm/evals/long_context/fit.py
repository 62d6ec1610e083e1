"""How much haystack a prompt of a given length can hold, found with few encodings of long texts."""

from __future__ import annotations

from collections.abc import Callable

_PROBE = 256  # units of the short text from which the rate of tokens a unit is first taken
_SLACK = 1000  # the part of a long prompt's room that may stay free: each further step would encode all of it again


class NoRoom(ValueError):
    """The shortest prompt of a task is longer than what it may have."""


def fit(
    tokens_of: Callable[[int], int],
    room: int,
    *,
    least: int = 0,
    most: int | None = None,
    start: int | None = None,
    slack: int | None = None,
) -> int:
    """The most units whose prompt has at most `room` tokens, up to one unit or `slack` tokens, whichever is more.

    Tokens must grow with units, nearly in proportion; nothing else is assumed of the tokenizer. Steps follow the slope between the
    last two texts, inside a bracket that only shrinks, so that a handful of encodings is enough at any length.

    Args:
        tokens_of: units -> tokens of the prompt that holds them.
        room: tokens the prompt may have.
        least: units that must be in it.
        most: units there are; None for no end.
        start: a first guess.
        slack: tokens that may stay free; None is a thousandth of `room`.

    Raises:
        NoRoom: a ValueError, when even `least` units do not fit, naming both sizes.
    """
    low, low_tokens = least, tokens_of(least)
    if low_tokens > room:
        raise NoRoom(
            f"a prompt of {low_tokens} tokens is the shortest this task has, and there is room for {max(0, room)}; ask for more"
        )
    high = None if most is None else most + 1
    slack = room // _SLACK if slack is None else slack
    aim = room - slack // 2  # so that a long text seldom overshoots by a few tokens, and is encoded once more
    guess = min(start or least + _PROBE, (high or least + _PROBE + 1) - 1)
    rate = 0.0
    while high is None or high - low > 1:
        guess = max(low + 1, guess if high is None else min(guess, high - 1))
        tokens = tokens_of(guess)
        rate = max((tokens - low_tokens) / (guess - low), 1e-6)
        if tokens <= low_tokens and guess - low >= _PROBE:
            raise ValueError(f"{guess - low} more words or lines gave no more tokens; this tokenizer does not read the text")
        if tokens > room:
            high = guess
        else:
            low, low_tokens = guess, tokens
        if room - low_tokens <= max(rate, slack) and low > least:
            break
        step = int((aim - low_tokens) / rate)
        # The slope of a short text says little about a long one: no leap of more than 64 times. Where the bracket stalls, cut it.
        guess = min(low + max(1, step), least + 64 * max(1, guess - least))
        if high is not None and guess >= high:
            guess = max(low + 1, (low + 7 * high) // 8)
    return low
