"""Small tasks that only a memory can do, made on the spot: recall, and the state of a machine. Equal arguments give equal tokens.

Targets stand at the token whose logits are scored (not one place later, as labels of `ProteusForCausalLM` do), so that the last
token counts too: `cross_entropy(logits.flatten(0, 1), targets.flatten())` is the loss, which ignores -100 by itself.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100
BLANK = 0
PARITY_VOCABULARY = 2


class Task(NamedTuple):
    """A batch of a task.

    Args:
        tokens: int64 (B, T), what the model reads.
        targets: int64 (B, T), what the logits at each token should say; -100 where nothing is asked.
    """

    tokens: Tensor
    targets: Tensor


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """Share of the targets that are not -100 at which logits (B, T, vocabulary) are largest at the target (B, T)."""
    asked = targets != IGNORED
    return (logits.argmax(-1)[asked] == targets[asked]).double().mean().item()


def mqar(batch: int, length: int, pairs: int, vocab: int, seed: int) -> Task:
    """Multi-query associative recall (Zoology, arXiv 2312.04927, section 3): key value pairs, then every key once more.

    A row begins with `pairs` different keys, each with its value behind it, keys from 1 .. vocab // 2 - 1 and values, different
    too, from vocab // 2 .. vocab - 1. Behind them all keys are asked in any order at random places, blanks (0) between; the
    target at such a place is the key's value. A model that knows which values the row has, but not to which keys they belong,
    answers right with probability 1 / pairs: that is chance here. (Zoology asks soon rather than late, and fills the gaps with
    random tokens; here every place is as likely and gaps stay empty.)

    Args:
        batch: rows.  length: tokens of a row, at least 3 * pairs.  pairs: at least 1.  vocab: tokens, see above.
        seed: of the random numbers; one seed, one batch.

    Raises:
        ValueError: for a length, or a vocabulary, that has no room for the pairs.
    """
    if pairs < 1 or length < 3 * pairs:
        raise ValueError(
            f"length is {length} with {pairs} pairs: a row needs 2 tokens a pair and 1 to ask for it; use a length of at least "
            f"{3 * max(pairs, 1)} and at least one pair"
        )
    half = vocab // 2
    if half - 1 < pairs:
        raise ValueError(
            f"vocab is {vocab} with {pairs} pairs: keys come from 1 .. {half - 1}; use a vocab of at least {2 * pairs + 2}"
        )
    generator = torch.Generator().manual_seed(seed)

    def choose(count: int) -> Tensor:
        """`pairs` different numbers below `count` for each row, in any order."""
        return torch.rand(batch, count, generator=generator).argsort(1)[:, :pairs]

    keys, values = choose(half - 1) + 1, choose(vocab - half) + half
    tokens = torch.full((batch, length), BLANK)
    tokens[:, : 2 * pairs] = torch.stack((keys, values), -1).flatten(1)
    places = 2 * pairs + choose(length - 2 * pairs)
    tokens.scatter_(1, places, keys)
    return Task(tokens, torch.full_like(tokens, IGNORED).scatter_(1, places, values))


def parity(batch: int, length: int, seed: int) -> Task:
    """Bits; the target at each is whether the ones so far are odd. The group Z_2: the smallest state to be tracked.

    Vocabulary: `PARITY_VOCABULARY`. Chance is 1/2.
    """
    tokens = torch.randint(0, 2, (batch, length), generator=torch.Generator().manual_seed(seed))
    return Task(tokens, tokens.cumsum(1) % 2)


def permutations(batch: int, length: int, seed: int, size: int = 5) -> Task:
    """Permutations of `size` things, one a token; the target at each is what all so far give when done one after another.

    The word problem of the symmetric group; for size 5 it is beyond any model of constant depth whose transitions commute or
    are diagonal (NC^1-complete; "The Illusion of State in State-Space Models", arXiv 2404.08819). Token i is the i-th permutation
    in lexicographic order, 0 the identity. Vocabulary: size! (120 for 5). Chance is 1 / size!.

    Raises:
        ValueError: for a size outside 1 .. 6, whose table of products would not be small.
    """
    if not 1 <= size <= 6:
        raise ValueError(f"size is {size}; permutations of 1 to 6 things are tabled here (6 gives 720 tokens): use one of these")
    table = _products(size)
    tokens = torch.randint(0, math.factorial(size), (batch, length), generator=torch.Generator().manual_seed(seed))
    state, states = torch.zeros(batch, dtype=torch.int64), []
    for now in tokens.unbind(1):
        state = table[state, now]
        states.append(state)
    return Task(tokens, torch.stack(states, 1) if states else tokens.clone())


@cache
def _products(size: int) -> Tensor:
    """int64 (n!, n!): the index of the permutation that does the first, then the second."""
    every = list(itertools.permutations(range(size)))
    index = {permutation: i for i, permutation in enumerate(every)}
    return torch.tensor([[index[tuple(second[i] for i in first)] for second in every] for first in every])
