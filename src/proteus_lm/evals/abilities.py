"""What a causal language model does exactly, seen by trying: carry its cache over pieces, over single tokens, and ignore padding.

Recurrent models of other packages often take a cache for single tokens only, or let padding into their state, and say so nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_LENGTH, _PADDING, _PIECE = 12, 6, 5


class Abilities(NamedTuple):
    """What holds up to rounding.

    Args:
        carries: pieces of several tokens through the cache are one long forward.
        steps: after a prompt, single tokens through the cache are one long forward.
        pads: padding on the left under an attention mask changes nothing, read as above.
    """

    carries: bool
    steps: bool
    pads: bool


class Forward(Protocol):
    """`LanguageModel._forward`."""

    def __call__(
        self, tokens: Tensor, cache: Any, keep: int, *, carry: bool = True, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits of the last `keep` columns, and the cache behind them."""
        ...


def probe(forward: Forward, vocabulary: int, device: torch.device) -> Abilities:
    """Try a model on a dozen tokens; what it cannot take at all (an exception) it cannot do. Call in evaluation mode."""
    tokens = (torch.arange(1, _LENGTH + 1, device=device)[None] ** 3) % vocabulary
    padded = torch.cat((tokens[:, :1].expand(1, _PADDING), tokens), 1)
    whole, _ = forward(tokens, None, 1, carry=False)
    # How much wrong reading would change: the measure of what counts as rounding.
    alone, _ = forward(tokens[:, -1:], None, 1, carry=False)
    seen, _ = forward(padded, None, 1, carry=False)

    def same(cuts: list[int], control: Tensor, padding: int = 0) -> bool:
        row = padded if padding else tokens
        mask = torch.arange(row.shape[1], device=device)[None] >= padding if padding else None
        logits, cache = whole, None
        try:
            for a, b in zip([0, *cuts], [*cuts, row.shape[1]]):
                logits, cache = forward(row[:, a:b], cache, 1, mask=None if mask is None else mask[:, :b])
        except Exception:  # whatever it is, the model does not do this
            return False
        return _close(logits, whole, control)

    steps = same([_LENGTH - 2, _LENGTH - 1], alone)
    carries = steps and same([_PIECE, 2 * _PIECE], alone)
    end = _LENGTH + _PADDING
    pieces = [_PIECE, 2 * _PIECE] if carries else []
    return Abilities(carries, steps, same([*pieces, *([end - 2, end - 1] if steps else [])], seen, _PADDING))


def _close(found: Tensor, wanted: Tensor, control: Tensor) -> bool:
    """Whether logits differ by rounding only: by a small part of what a wrong context changes, or by next to nothing."""
    found, wanted, control = (x[:, -1].double() for x in (found, wanted, control))
    share, nothing = (1e-2, 1e-5) if torch.finfo(found.dtype).bits >= 32 else (0.1, 1e-3)
    error, effect, size = ((x - wanted).square().mean().sqrt() for x in (found, control, torch.zeros_like(wanted)))
    return bool(error <= share * effect) or bool(error <= nothing * size)
