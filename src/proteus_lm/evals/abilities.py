"""What a causal language model does exactly, seen by trying: share a batch, carry its cache over pieces or tokens, ignore padding.

Recurrent models of other packages often take a cache for single tokens only, mix the rows of a batch, or let padding into their
state, and say so nowhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

_LENGTHS = (12, 9, 6)  # tokens of the rows tried; what the shorter ones lack is padding
_PIECE, _STEPS = 5, 2


class Abilities(NamedTuple):
    """What holds up to rounding.

    Args:
        rows: the rows of a batch are what each is alone, whatever stands on their right; where not, the rest is of one row.
        carries: pieces of several tokens through the cache are one long forward.
        steps: after a prompt, single tokens through the cache are one long forward.
        pads: padding on the left under an attention mask changes nothing, read as above.
    """

    rows: bool
    carries: bool
    steps: bool
    pads: bool

    def cost(self) -> str | None:
        """What is done in place of what it cannot do, for people to read; None where it can do all."""
        ways = [
            "one row at a time" * (not self.rows),
            "each text whole in one forward, in memory that grows with it" * (not self.carries),
            "the whole text again for each new token" * (not self.steps),
            "only prompts of equal length together" * (self.rows and not self.pads),
        ]
        return ", ".join(filter(None, ways)) or None


class Forward(Protocol):
    """`LanguageModel._forward`."""

    def __call__(
        self, tokens: Tensor, cache: Any, keep: int, *, carry: bool = True, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits of the last `keep` columns, and the cache behind them."""
        ...


def probe(forward: Forward, vocabulary: int, device: torch.device, chunk: int, model: nn.Module) -> Abilities:
    """Try a model on rows of a dozen tokens and fewer; what it cannot take at all (an exception) it cannot do.

    Call in evaluation mode.

    Args:
        chunk: tokens of a piece in use; pieces tried are no longer.
        model: behind `forward`; it says how coarsely it rounds.
    """
    count, width = len(_LENGTHS), max(_LENGTHS)
    tokens = ((torch.arange(1, count * width + 1, device=device).view(count, width) ** 3) % vocabulary).long()
    places = torch.arange(width, device=device)[None]
    lengths = torch.tensor(_LENGTHS, device=device)[:, None]
    right, left = places < lengths, places >= width - lengths
    ends = torch.zeros_like(tokens).masked_scatter(left, tokens[right])  # the same rows, padded on the left
    tokens = tokens * right
    alone = [forward(row[None, :length], None, length, carry=False)[0] for row, length in zip(tokens, _LENGTHS)]
    wanted = _logs(torch.cat([row[0] for row in alone]))
    limit = _rounding(forward, tokens, alone, wanted, model)

    def same(rows: int, cuts: list[int], *, padded: bool = False) -> bool:
        row, real = (ends, left) if padded else (tokens, right)
        logits, cache = [], None
        try:
            for a, b in zip([0, *cuts], [*cuts, width]):
                part, cache = forward(row[:rows, a:b], cache, b - a, carry=b < width, mask=real[:rows, :b] if padded else None)
                logits.append(part)
            found = _logs(torch.cat(logits, 1)[real[:rows]])
        except Exception:  # whatever it is, the model does not do this
            return False
        return _distance(found, wanted[: len(found)]) <= limit

    single = [*range(width - _STEPS, width)]
    pieces = [*range(min(chunk, _PIECE), width, min(chunk, _PIECE))]

    def able(rows: int) -> tuple[bool, bool]:
        steps = same(rows, single)
        return steps and same(rows, pieces), steps

    together = same(count, [])
    carries, steps = able(count) if together else (False, False)
    if not (carries and steps):
        by_one = able(1)
        if not together or by_one > (carries, steps):
            return Abilities(False, *by_one, False)
    begin = [cut for cut in pieces if cut < single[0]] if carries else []
    return Abilities(True, carries, steps, same(count, [*begin, *(single if steps else [])], padded=True))


def _rounding(forward: Forward, tokens: Tensor, alone: list[Tensor], wanted: Tensor, model: nn.Module) -> float:
    """Up to where two readings differ by rounding only, as `_distance`.

    The measure is what one rounding of every embedded token changes: it knows how much this model amplifies rounding. Honest
    readings of the models tried (attention of many kinds, recurrent; weights as drawn and four times as large) differ by up to 8
    times that in fp32 and up to once in bf16, wrong ones by 80 times or more in fp32. In bf16 rounding hides smaller errors.
    """
    # Logits can be finer than what they are made of; weights of one byte are only stored so.
    types = {alone[0].dtype, *(p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1)}
    eps = max(torch.finfo(dtype).eps for dtype in types)
    times = 20 if eps < 1e-5 else 3
    floor = eps * float(torch.cat([row[0] for row in alone]).double().std())
    if not hasattr(model, "get_input_embeddings"):
        return times * floor
    generator = torch.Generator().manual_seed(0)

    def shaken(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + eps * signs)

    hook = cast(Any, model).get_input_embeddings().register_forward_hook(shaken)
    try:
        found = [forward(row[None, :length], None, length, carry=False)[0][0] for row, length in zip(tokens, _LENGTHS)]
    finally:
        hook.remove()
    return times * max(floor, _distance(_logs(torch.cat(found)), wanted))


def _logs(logits: Tensor) -> Tensor:
    """Log probabilities, fp64 (tokens, vocabulary)."""
    return logits.double().log_softmax(-1)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over the vocabulary, at the token where it is largest; logits at -inf in both agree."""
    return float((found - wanted).masked_fill(found == wanted, 0).square().mean(-1).sqrt().max())
