"""Perplexity by token position: whole, by position, and past the context a model was trained with.

Each window is one sequence whose positions count from 0 at its start. It is read in pieces of `chunk` tokens with the model's state
carried from piece to piece, so a longer window costs time and not memory, and the result is that of one long forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from proteus_lm.cache import ProteusCache
from proteus_lm.evals.statistics import Estimate, ratio_estimate
from proteus_lm.evals.windows import Documents, LeftOut, Window, choose_windows

if TYPE_CHECKING:
    from proteus_lm.evals.language_model import LanguageModel
    from proteus_lm.evals.suite import SuiteOptions, SuiteResult

Reader = Callable[[Tensor], Iterator[tuple[int, Tensor]]]
"""Rows of tokens int64 (B, T) -> the first column of each piece and its logits (B, t, vocabulary), piece by piece."""


@dataclass(frozen=True)
class PerplexityResult:
    """Losses of one model on the windows of one split.

    Args:
        windows: what was predicted; two results on equal windows can be compared pair by pair.
        left_out: tokens of the split that were not predicted, by reason.
        edges: positions at which bins start, and the last one's end: bin i holds positions edges[i] .. edges[i + 1] - 1.
        sums: float64 (windows, bins), loss in nats summed over the tokens of a bin.
        counts: int64 (windows, bins), those tokens.
        context: predictions a window, None for whole documents.
        training_context: positions the model was trained with, None when unknown.
        bytes_per_token: of the text predicted, None when unknown.
    """

    windows: tuple[Window, ...]
    left_out: LeftOut
    edges: tuple[int, ...]
    sums: np.ndarray
    counts: np.ndarray
    context: int | None
    training_context: int | None = None
    bytes_per_token: float | None = None

    def between(self, first: int, last: int) -> Estimate:
        """Mean loss (nats/token) over positions first <= p < last; both must be edges of bins.

        Raises:
            ValueError: for a position that is not an edge.
        """
        for position in (first, last):
            if position not in self.edges:
                raise ValueError(f"position {position} is not an edge of a bin; edges are {self.edges}")
        bins = slice(self.edges.index(first), self.edges.index(last))
        return ratio_estimate(self.sums[:, bins].sum(1), self.counts[:, bins].sum(1), [w.document for w in self.windows])

    @property
    def whole(self) -> Estimate:
        """Mean loss (nats/token) over all positions, its standard error over documents."""
        return self.between(self.edges[0], self.edges[-1])

    @property
    def within_training(self) -> Estimate | None:
        """Mean loss over the positions the model was trained with; None when that context is unknown or not reached."""
        reached = self.training_context is not None and self.training_context in self.edges
        return self.between(0, self.training_context) if reached and self.training_context else None

    @property
    def past_training(self) -> Estimate | None:
        """Mean loss over the positions past the training context; None when there are none."""
        past = self.training_context is not None and self.training_context < self.edges[-1]
        return self.between(self.training_context, self.edges[-1]) if past and self.training_context else None

    @property
    def bins(self) -> tuple[Estimate, ...]:
        """Mean loss (nats/token) of each bin of positions, its standard error over documents."""
        return tuple(self.between(a, b) for a, b in zip(self.edges, self.edges[1:]))

    @property
    def perplexity(self) -> float:
        """exp(mean loss in nats per token); infinite past what a double holds."""
        return math.exp(self.whole.mean) if self.whole.mean < 700 else math.inf

    def bits_per_byte(self, loss: float) -> float | None:
        """A loss in nats per token as bits per byte of text; None when the bytes of a token are unknown."""
        return None if self.bytes_per_token is None else loss / math.log(2) / self.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """Every number of the result, ready for JSON; an estimate is {mean, error, groups, tokens} in nats per token."""
        optional = {"within_training": self.within_training, "past_training": self.past_training}
        return {
            "context": self.context,
            "training_context": self.training_context,
            "windows": len(self.windows),
            "documents": len({w.document for w in self.windows}),
            "left_out": asdict(self.left_out),
            "bytes_per_token": self.bytes_per_token,
            "loss": asdict(self.whole),
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte(self.whole.mean),
            **{name: estimate and asdict(estimate) for name, estimate in optional.items()},
            "bins": [{"start": a, "end": b, **asdict(e)} for a, b, e in zip(self.edges, self.edges[1:], self.bins)],
        }

    def to_raw(self) -> dict[str, Any]:
        """Everything, ready for JSON, so that `from_raw` gives an equal result and `compare` can pair it later."""
        return {
            "windows": [[w.document, w.start, w.length] for w in self.windows],
            "left_out": asdict(self.left_out),
            "edges": list(self.edges),
            "sums": self.sums.tolist(),
            "counts": self.counts.tolist(),
            "context": self.context,
            "training_context": self.training_context,
            "bytes_per_token": self.bytes_per_token,
        }

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> PerplexityResult:
        """The result that `to_raw` wrote.

        Raises:
            ValueError: for anything else.
        """
        try:
            return cls(
                windows=tuple(Window(*w) for w in raw["windows"]),
                left_out=LeftOut(**raw["left_out"]),
                edges=tuple(raw["edges"]),
                sums=np.array(raw["sums"], dtype=np.float64),
                counts=np.array(raw["counts"], dtype=np.int64),
                context=raw["context"],
                training_context=raw["training_context"],
                bytes_per_token=raw["bytes_per_token"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"these are no raw rows of a perplexity ({type(error).__name__}: {error}); evaluate again") from error


def bin_edges(length: int, bins: int, training_context: int | None = None) -> tuple[int, ...]:
    """Edges of about `bins` equal stretches of 0 .. length - 1, with one at the training context where that is inside.

    Past the training context the stretches go on at the width used within it, so that contexts of 1, 2 and 4 times share bins.

    Raises:
        ValueError: when `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; it must be at least 1")
    inside = min(length, training_context or length)
    count = min(bins, inside)
    edges = [inside * i // count for i in range(count + 1)]
    width = max(1, inside // count)
    edges += [*range(inside + width, length, width), *([length] if length > inside else [])]
    return tuple(edges)


def evaluate(
    model: nn.Module,
    dataset: Documents,
    *,
    context: int | None,
    batch_size: int = 8,
    max_tokens: int | None = None,
    bins: int = 16,
    training_context: int | None = None,
    chunk: int = 2048,
    bytes_per_token: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    edges: Sequence[int] | None = None,
    longest: int | None = None,
    read: Reader | None = None,
) -> PerplexityResult:
    """Loss of a causal language model on one split, token by token.

    The model is put in evaluation mode and its flag of training set back afterwards. Nothing is random.

    Args:
        model: model(input_ids, past_key_values=ProteusCache, use_cache=...) -> object with `logits` (B, T, vocabulary), the cache
            updated; `model.config.vocab_size` bounds its tokens.
        dataset: documents of token ids.
        context: predictions a window; None reads each document whole.
        batch_size: windows read at once.
        max_tokens: predict at most about this many tokens, windows spread evenly over the split; the rest is counted as left out.
        bins: stretches of positions within the training context (or within the window when that is unknown).
        training_context: positions the model was trained with.
        chunk: tokens a forward pass; the state is carried between passes. Bounds the memory needed.
        bytes_per_token: of the split's text, for bits per byte.
        progress: called with (tokens predicted, tokens to predict) after each pass.
        edges: rising edges of the bins in place of `bins`, the first 0; those within the longest window are used.
        longest: with `context` None, predictions in a document at most.
        read: how rows of tokens become logits; by default the model with a ProteusCache, `chunk` tokens a pass.

    Raises:
        ValueError: for sizes below 1, documents shorter than a window, a token id the model does not know, or a loss that is
            not finite.
    """
    for name, value in (("batch_size", batch_size), ("chunk", chunk)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    windows, left_out = choose_windows(dataset, context, max_tokens, longest=longest)
    width = max(w.length for w in windows)
    edges = bin_edges(width, bins, training_context) if edges is None else (*(e for e in edges if e < width), width)
    read = read or _own_reader(model, chunk)
    sums = np.zeros((len(windows), len(edges) - 1))
    counts = np.zeros(sums.shape, dtype=np.int64)
    # Windows of like length share a batch: what is padded behind a shorter one is work for nothing.
    order = sorted(range(len(windows)), key=lambda i: (-windows[i].length, i))
    total, done = sum(w.length for w in windows), 0
    with evaluation_mode(model):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for first, losses, valid in _losses(model, dataset, [windows[i] for i in batch], read):
                _add(sums, counts, batch, edges, first, losses, valid)
                done += int(valid.sum())
                if progress is not None:
                    progress(done, total)
    _check_finite(sums, windows)
    return PerplexityResult(windows, left_out, edges, sums, counts, context, training_context, bytes_per_token)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the model's flag of training is as before when the block is left."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


def _own_reader(model: nn.Module, chunk: int) -> Reader:
    """Logits of one of our models, its state carried from piece to piece."""

    def read(tokens: Tensor) -> Iterator[tuple[int, Tensor]]:
        cache = ProteusCache() if tokens.shape[1] > chunk else None
        for first in range(0, tokens.shape[1], chunk):
            piece = tokens[:, first : first + chunk]
            yield first, model(input_ids=piece, past_key_values=cache, use_cache=cache is not None).logits  # updates the cache

    return read


def _losses(
    model: nn.Module, dataset: Documents, windows: Sequence[Window], read: Reader
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Piece by piece: its first position, loss in nats of each prediction, float64 (B, t), and which of them belong to a window."""
    device = next(model.parameters()).device
    length = max(w.length for w in windows)
    tokens = np.zeros((len(windows), length + 1), dtype=np.int64)
    for row, w in zip(tokens, windows):
        row[: w.length + 1] = dataset.document(w.document)[w.start : w.start + w.length + 1]
    config: Any = model.config
    vocabulary = (config.get_text_config() if hasattr(config, "get_text_config") else config).vocab_size
    if tokens.max() >= vocabulary:
        raise ValueError(
            f"token {tokens.max()} is outside the model's vocabulary of {vocabulary}; the data were made with another tokenizer"
        )
    # Padding stands behind a window's last token, where a causal model cannot let it touch what is counted.
    valid = np.arange(length) < np.array([[w.length] for w in windows])
    whole = torch.from_numpy(tokens).to(device)
    for first, logits in read(whole[:, :-1]):
        last = first + logits.shape[1]
        yield first, _token_losses(logits, whole[:, first + 1 : last + 1]), valid[:, first:last]


def _token_losses(logits: Tensor, targets: Tensor) -> np.ndarray:
    """Loss in nats, float64 (B, t); computed in fp32 whatever the model's type."""
    losses = cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).double().cpu().numpy()


def _add(
    sums: np.ndarray,
    counts: np.ndarray,
    rows: Sequence[int],
    edges: Sequence[int],
    first: int,
    losses: np.ndarray,
    valid: np.ndarray,
) -> None:
    """Add a piece's losses to the bins of its windows."""
    bins = np.searchsorted(np.asarray(edges), np.arange(first, first + losses.shape[1]), side="right") - 1
    for row, loss, keep in zip(rows, losses, valid):
        sums[row] += np.bincount(bins[keep], loss[keep], sums.shape[1])
        counts[row] += np.bincount(bins[keep], minlength=sums.shape[1])


def _check_finite(sums: np.ndarray, windows: Sequence[Window]) -> None:
    bad = np.flatnonzero(~np.isfinite(sums).all(1))
    if len(bad):
        w = windows[bad[0]]
        raise ValueError(
            f"the loss is not finite in {len(bad)} of {len(windows)} windows, first in document {w.document} from token {w.start}; "
            "look at the model's weights, or evaluate in float32"
        )


def fig4(model: LanguageModel, options: SuiteOptions) -> SuiteResult:
    """As `positions.perplexity_by_position`, under the name that `suite.SUITES` asks for."""
    from proteus_lm.evals.positions import perplexity_by_position

    return perplexity_by_position(model, options)
