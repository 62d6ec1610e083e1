"""Stand-ins that are real enough to be wrong: a recurrent model with a true state, and documents in memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn


class Recurrent(nn.Module):
    """A GRU language model: causal, and its state must be carried or the loss changes. Remembers how it was called."""

    def __init__(self, vocabulary: int = 11, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.embed = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.lengths: list[int] = []
        self.modes: list[tuple[bool, bool]] = []
        with torch.no_grad():  # far from uniform, so that positions differ
            for parameter in self.parameters():
                parameter.mul_(3)

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        self.lengths.append(input_ids.shape[1])
        self.modes.append((self.training, torch.is_grad_enabled()))
        hidden, state = self.gru(self.embed(input_ids), None if past_key_values is None else past_key_values.states)
        if use_cache:
            past_key_values.states = state
        return SimpleNamespace(logits=self.head(hidden))


class Texts:
    """Documents given as arrays."""

    def __init__(self, *documents) -> None:
        self._documents = [np.asarray(d, dtype=np.uint16) for d in documents]

    @property
    def documents(self) -> int:
        return len(self._documents)

    def document(self, index: int) -> np.ndarray:
        return self._documents[index]


def texts(*lengths: int, seed: int = 0, vocabulary: int = 11) -> Texts:
    random = np.random.default_rng(seed)
    return Texts(*(random.integers(0, vocabulary, n) for n in lengths))


def direct_losses(model: nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Loss of each prediction by one forward pass of one row, in nats."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits[0].double()
    return -logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
