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


def mqar_text(batch: int, length: int, pairs: int, vocab: int, seed: int) -> Task:
    """`mqar` as text to train a language model on: an asked key is followed by its value, so that the next token is the answer.

    Keys, values, blanks and chance are those of `mqar`; `length` is at least 4 * pairs. The target at an asked key is its value.

    Raises:
        ValueError: as `mqar`.
    """
    if pairs < 1 or length < 4 * pairs:
        raise ValueError(
            f"length is {length} with {pairs} pairs: a row needs 2 tokens to give a pair and 2 to ask for it; use a length of at "
            f"least {4 * max(pairs, 1)} and at least one pair"
        )
    asked, answers = mqar(batch, length - pairs, pairs, vocab, seed)
    rows = []
    for row, wanted in zip(asked.tolist(), answers.tolist()):
        tokens, targets = [], []
        for token, target in zip(row, wanted):
            tokens += [token] if target == IGNORED else [token, target]
            targets += [IGNORED] if target == IGNORED else [target, IGNORED]
        rows.append((tokens, targets))
    return Task(*(torch.tensor([row[i] for row in rows]).view(batch, length) for i in (0, 1)))


def key_value_stream(batch: int, length: int, keys: int, vocab: int, seed: int, fresh: float = 0.5) -> Task:
    """A long stream of key value pairs, in which keys given before come again with the value they had: recall at every distance.

    Every second token is a key, its value behind it. A key is new with probability `fresh` as long as fewer than `keys` have been
    given, and else any of those given before, each as likely; the target at such a key is its value. Ids are those of `mqar`:
    keys 1 .. vocab // 2 - 1, values vocab // 2 .. vocab - 1, each value drawn by itself. An odd last token is a blank (0). Chance
    is 1 / (vocab - vocab // 2).

    Args:
        batch: rows.  length: tokens of a row, at least 4.  keys: different keys of a row.  vocab: tokens, see above.
        seed: of the random numbers; one seed, one batch.

    Raises:
        ValueError: for a length without room for two pairs, a vocabulary without so many keys, or `fresh` outside 0 .. 1.
    """
    half = vocab // 2
    if length < 4:
        raise ValueError(f"length is {length}: a stream needs a pair and a question about it; use at least 4 tokens")
    if not 1 <= keys <= half - 1:
        raise ValueError(
            f"vocab is {vocab} with {keys} keys: keys come from 1 .. {half - 1}; use a vocab of at least {2 * keys + 2}"
        )
    if not 0 < fresh <= 1:
        raise ValueError(f"fresh is {fresh}; it must be above 0 and at most 1")
    draw = torch.Generator().manual_seed(seed)
    steps = length // 2
    names = torch.rand(batch, half - 1, generator=draw).argsort(1)[:, :keys] + 1
    values = torch.randint(half, vocab, (batch, keys), generator=draw)
    new = torch.rand(batch, steps, generator=draw) < fresh
    new[:, 0] = True
    given = new.long().cumsum(1).clamp(max=keys)  # keys given up to here, this one among them where it is new
    new &= torch.cat((given[:, :1], given.diff(dim=1)), 1) > 0
    again = (torch.rand(batch, steps, generator=draw) * given).long()
    index = torch.where(new, given - 1, again)
    tokens, targets = torch.full((batch, length), BLANK), torch.full((batch, length), IGNORED)
    tokens[:, 0 : 2 * steps : 2], tokens[:, 1 : 2 * steps : 2] = names.gather(1, index), values.gather(1, index)
    targets[:, 0 : 2 * steps : 2] = torch.where(new, IGNORED, tokens[:, 1 : 2 * steps : 2])
    return Task(tokens, targets)


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
