"""A causal language model and its tokenizer, as every evaluation asks them: log-likelihoods, whole documents, greedy text.

Sequences are read in pieces of `chunk` tokens with the model's cache carried from piece to piece: a long one costs time and, where
the memory has a fixed size, no more space. Scored sequences are padded on the right, where a causal model cannot see it;
prompts to go on from are padded on the left where the model was seen to take that exactly, and batched by equal length where not.
A model of another package that was seen to be wrong in a batch or with its cache (`abilities`) is read one row at a time, or whole,
and that is said. So neither padding, nor the batch size, nor `chunk` changes a score. Nothing is cut unless that was allowed, and
then it is counted.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from proteus_lm.evals.abilities import Abilities, probe
from proteus_lm.evals.loading import load
from proteus_lm.evals.long_context.tokens import tokenizer_hash
from proteus_lm.evals.perplexity import evaluation_mode
from proteus_lm.model import ProteusForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
LOGITS = 2**28
"""Logits of one forward at most, as far as a piece can be made shorter: 1 GiB in fp32."""
_SHORT = 64  # tokens; below, a call costs more than the padding that it saves
_CACHES = ("cache", "past_key_values", "cache_params", "state")
_LIMITS = ("n_positions", "max_position_embeddings", "n_ctx")


class TooLong(ValueError):
    """A sequence has more tokens than the model can read, and cutting was not allowed."""


class LanguageModel:
    """A causal language model with its tokenizer. Make one with `LanguageModel.open`, or of objects at hand.

    Args:
        model: ours, or any of transformers' causal language models (or one with its interface); put in evaluation mode while used.
        tokenizer: transformers' tokenizer of that model.
        name: what it is called in results.
        batch_size: sequences read at once; None is 8, or on a GPU 128 for ours whose memory does not grow with the text.
        chunk: tokens of each sequence in one forward.
        allow_truncation: cut what is too long on the left, and count it in `truncated`, instead of raising.
        max_length: tokens it can read at most, 0 for no limit; None is what its configuration says (recurrent models of other
            packages often name a limit there that they do not have).

    Attributes:
        checkpoint: step and SHA-256 of the trainer.json of the checkpoint it was opened from; None for a model that is none.
        truncated: sequences cut so far.
        windowed: documents of `rolling` so far that were longer than `max_length` and so read in windows.

    Raises:
        ValueError: for sizes below 1, or a tokenizer without an end token.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "model",
        batch_size: int | None = None,
        chunk: int = 2048,
        allow_truncation: bool = False,
        max_length: int | None = None,
    ) -> None:
        for what, value in (("batch_size", batch_size), ("chunk", chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{what} is {value}; it must be at least 1")
        if max_length is not None and max_length < 0:
            raise ValueError(f"max_length is {max_length}; it must be a number of tokens, or 0 for no limit")
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {name} names no end token; set eos_token in its tokenizer_config.json")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        self.chunk, self.allow_truncation = chunk, allow_truncation
        self.checkpoint: dict[str, Any] | None = None
        self.truncated = self.windowed = 0
        self._given_length = max_length
        self.batch_size = batch_size or self._usual_rows()

    @classmethod
    def open(
        cls,
        run_or_path_or_hub_name: str | Path,
        *,
        step: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        batch_size: int | None = None,
        chunk: int = 2048,
        allow_truncation: bool = False,
        max_length: int | None = None,
    ) -> LanguageModel:
        """The model and tokenizer of a run folder of ours, of a folder that transformers reads, or of a name on the hub.

        Args:
            run_or_path_or_hub_name: a run (its newest checkpoint, or that of `step`), a folder with config.json, or a name.
            step: of a run only.
            device: to put the model on.
            dtype: of its weights; None is fp32 for ours, and as they were saved for others.
            batch_size, chunk, allow_truncation, max_length: as the class.

        Raises:
            FileNotFoundError: when there is neither such a folder nor such a name on a hub that can be reached.
            ValueError: for a folder whose weights or tokenizer do not load, or a `step` of something that is no run.
        """
        model, tokenizer, name, checkpoint = load(run_or_path_or_hub_name, step, dtype)
        model = model.to(device).eval()
        options: dict[str, Any] = {"batch_size": batch_size, "chunk": chunk, "max_length": max_length}
        opened = cls(model, tokenizer, name=name, allow_truncation=allow_truncation, **options)
        opened.checkpoint = checkpoint
        return opened

    # What it is.

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.model.parameters()).device

    @cached_property
    def vocab_size(self) -> int:
        """Tokens it knows."""
        config = self.model.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return int(text.vocab_size)

    @cached_property
    def is_ours(self) -> bool:
        """Whether it is one of this package's: masks and caches are exact, and no position is the last one."""
        return isinstance(self.model, ProteusForCausalLM)

    @cached_property
    def max_length(self) -> int | None:
        """Tokens it can read at most, None where nothing limits them: ours, and others whose configuration names no limit."""
        if self._given_length is not None:
            return self._given_length or None
        if self.is_ours:
            return None
        config = getattr(self.model.config, "text_config", None) or self.model.config
        found = (getattr(config, name, None) for name in _LIMITS)
        return next((int(limit) for limit in found if limit is not None), None)

    def _usual_rows(self) -> int:
        """A decoding step of a GPU costs its launches: the more rows share it, the better, while there is room for their states."""
        fixed = self.is_ours and not any(block.mixer.growing for block in self.model.layers)
        return 128 if fixed and self.device.type == "cuda" else 8

    @property
    def rows(self) -> int:
        """Sequences read at once: `batch_size`, or 1 where the model was seen to mix the rows of a batch."""
        return self.batch_size if self.batch_size == 1 or self._abilities.rows else 1

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""
        return int(self.tokenizer.eos_token_id)  # pyright: ignore[reportArgumentType]

    @property
    def prefix_id(self) -> int:
        """The token before a document's first: the tokenizer's beginning token, or its end token."""
        first = self.tokenizer.bos_token_id
        return self.eos_id if first is None else int(first)  # pyright: ignore[reportArgumentType]

    @cached_property
    def tokenizer_hash(self) -> str:
        """SHA-256 (hex) of what the tokenizer's ids depend on, of which every suite's samples are made."""
        return tokenizer_hash(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens the tokenizer puts around it (most put none)."""
        return list(self.tokenizer.encode(text))

    # Scores.

    def loglikelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p(continuation | context), a sum in nats, and whether greedy decoding gives it.

        Sequences of like length share a batch; pairs that differ only in the last token are read once.

        Raises:
            ValueError: for an empty context or continuation, an unknown token, or a result that is not a number.
            TooLong: a ValueError, for a pair longer than the model, unless truncation is allowed: then the context loses its first
                tokens.
        """
        results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        shared: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for i, (context, continuation) in enumerate(pairs):
            if not context or not continuation:
                what = "context" if not context else "continuation"
                raise ValueError(f"the {what} of pair {i} has no token; give a context of at least the prefix token, and an answer")
            read = self._fitting([*context, *continuation], len(continuation) + 1, extra=1, what=f"pair {i}")
            shared.setdefault((tuple(read[:-1]), len(continuation)), []).append(i)
        order = sorted(shared, key=lambda key: (-len(key[0]), key))
        with evaluation_mode(self.model):
            for batch in self._batches(order, lambda key: len(key[0])):
                asked = [[torch.tensor(pairs[i][1]) for i in shared[key]] for key in batch]
                scores = self._score([torch.tensor(read) for read, _ in batch], asked)
                for key, row in zip(batch, scores):
                    for i, score in zip(shared[key], row):
                        results[i] = score
        return results

    def rolling(self, documents: Sequence[list[int]], *, prefix: int) -> list[float]:
        """Sum of log p of every token of each document, in nats, the first given `prefix`.

        The state is carried through the whole document. Only where a document is longer than the model's limit (`max_length`) is it
        read in windows of that length that predict each token once, as lm-evaluation-harness does, and counted in `windowed`.

        Raises:
            ValueError: for an unknown token, or a result that is not a number.
        """
        rows: list[tuple[int, Tensor, int]] = []  # document, tokens to read and predict, how many of them to predict
        for i, document in enumerate(documents):
            self._check_known([prefix, *document], f"document {i}")
            windows = list(_windows(torch.tensor([prefix, *document]), self.max_length))
            self.windowed += len(windows) > 1
            rows += [(i, tokens, count) for tokens, count in windows]
        rows.sort(key=lambda row: -len(row[1]))
        totals = [0.0] * len(documents)
        with evaluation_mode(self.model):
            for batch in self._batches(rows, lambda row: len(row[1])):
                asked = [[tokens[len(tokens) - count :]] for _, tokens, count in batch]
                scores = self._score([tokens[:-1] for _, tokens, _ in batch], asked)
                for (i, _, _), ((total, _),) in zip(batch, scores):
                    totals[i] += total
        return totals

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """The text that greedy decoding writes after each prompt, up to (without) the end token or the first of the strings `stop`.

        Raises:
            ValueError: for an empty prompt, an unknown token, `max_new_tokens` below 1, or logits that are not numbers.
            TooLong: a ValueError, for a prompt that leaves no room for `max_new_tokens`, unless truncation is allowed: then the
                prompt loses its first tokens.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        if any(not text for text in stop):
            raise ValueError("a stop string is empty, which would end every text before its first token; leave it out")
        ready = []
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} has no token; give at least the prefix token")
            ready.append(self._fitting(list(prompt), 1, extra=-max_new_tokens, what=f"prompt {i} with {max_new_tokens} new tokens"))
        order = sorted(range(len(ready)), key=lambda i: -len(ready[i]))
        texts = [""] * len(ready)
        with evaluation_mode(self.model):
            for batch in self._alike(order, ready):
                for i, text in zip(batch, self._continue([ready[i] for i in batch], max_new_tokens, tuple(stop))):
                    texts[i] = text
        return texts

    # Reading.

    def _batches(self, items: list[T], length: Callable[[T], int]) -> Iterator[list[T]]:
        """Batches of items sorted by length, longest first; what is padded is no longer than what is read, but for short items."""
        batch: list[T] = []
        for item in items:
            if batch and (len(batch) == self.rows or 2 * length(item) + _SHORT < length(batch[0])):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def _fitting(self, tokens: list[int], needed: int, *, extra: int, what: str) -> list[int]:
        """The tokens, or their last ones where there are more than max_length + extra and cutting is allowed."""
        self._check_known(tokens, what)
        if self.max_length is None or len(tokens) <= self.max_length + extra:
            return tokens
        room = self.max_length + extra
        if not self.allow_truncation or room < needed:
            raise TooLong(
                f"{what}: {len(tokens)} tokens, and {self.name} has room for {room} (its limit is {self.max_length}); "
                "choose shorter samples or a model without a limit, or allow truncation, which is then counted"
            )
        self.truncated += 1
        return tokens[-room:]

    def _check_known(self, tokens: list[int], what: str) -> None:
        """Raise ValueError for a token outside the vocabulary."""
        if tokens and (max(tokens) >= self.vocab_size or min(tokens) < 0):
            wrong = next(t for t in tokens if not 0 <= t < self.vocab_size)
            raise ValueError(f"{what}: token {wrong} is outside the model's vocabulary of {self.vocab_size}; use its own tokenizer")

    def _score(self, inputs: list[Tensor], asked: list[list[Tensor]]) -> list[list[tuple[float, bool]]]:
        """Read each row of `inputs`, int64 (T,); score its continuations, each as `loglikelihoods` gives it.

        A row's continuations have one length and agree in all but the last token: those before it are the end of the row.
        """
        firsts = [len(row) - len(answers[0]) + 1 for row, answers in zip(inputs, asked)]  # place of the first token asked for
        tokens = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.int64)
        for i, row in enumerate(inputs):
            tokens[i, : len(row)] = row
        slots = [(i, answer) for i, answers in enumerate(asked) for answer in answers]
        totals, misses = torch.zeros(2, len(slots), dtype=torch.float64)
        for start, logits in self.pieces(tokens.to(self.device), min(firsts) - 1):
            # A token at place p is predicted by the logits of column p - 1.
            spans = [(max(first, start + 1), min(len(row), start + logits.shape[1]) + 1) for first, row in zip(firsts, inputs)]
            cuts = [answer[max(0, spans[i][0] - firsts[i]) : max(0, spans[i][1] - firsts[i])] for i, answer in slots]
            owners = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor([len(cut) for cut in cuts]))
            if not len(owners):
                continue
            rows = torch.tensor([i for i, _ in slots])[owners]
            columns = torch.cat(
                [torch.arange(spans[i][0] - 1 - start, spans[i][0] - 1 - start + len(c)) for (i, _), c in zip(slots, cuts)]
            )
            logs, hits = _log_probabilities(logits, rows, columns, torch.cat(cuts))
            totals.index_add_(0, owners, logs)
            misses.index_add_(0, owners, (~hits).double())
        if totals.isnan().any():
            raise ValueError(f"{self.name} gives logits that are not numbers; look at its weights, or evaluate in float32")
        scores = iter(zip(totals.tolist(), (misses == 0).tolist()))
        return [[next(scores) for _ in answers] for answers in asked]

    def pieces(self, tokens: Tensor, start: int) -> Iterator[tuple[int, Tensor]]:
        """Logits of right-padded rows (B, T) from column `start` on, piece by piece: first column, (B, t, vocabulary)."""
        rows, width = tokens.shape
        size, room = self.chunk, max(1, LOGITS // (rows * self.vocab_size))
        if (width <= size and width - start <= room) or not self._abilities.carries:
            size = room = width
        cache, a = None, 0
        while a < width:
            b = min(a + size, width, max(a, start) + room)
            keep = max(1, b - max(a, start))
            logits, cache = self._forward(tokens[:, a:b], cache, keep, carry=b < width)
            if b > start:
                yield max(a, start), logits
            a = b

    def _forward(
        self, tokens: Tensor, cache: Any, keep: int, *, carry: bool = True, mask: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Logits of the last `keep` columns (B, keep, vocabulary), and the cache behind these tokens if it is to be carried on.

        `mask`: bool (B, past + t), false for padding, of all columns so far; None where there is none.
        """
        options: dict[str, Any] = {"use_cache": carry or cache is not None}
        if cache is not None:
            options[self._cache_name] = cache
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = keep
        if mask is not None:
            options["attention_mask"] = mask[:, -tokens.shape[1] :] if self.is_ours else mask.long()
            if "position_ids" in self._parameters:
                options["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = self.model(input_ids=tokens, **options)
        caches = (getattr(output, name, None) for name in _CACHES)
        return output.logits[:, -keep:], next((found for found in caches if found is not None), None) if carry else None

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def _cache_name(self) -> str:
        return next((name for name in _CACHES if name in self._parameters), _CACHES[0])

    @cached_property
    def _abilities(self) -> Abilities:
        """What the model does exactly: ours by contract, others as seen on a few tokens; what that costs is said."""
        if self.is_ours:
            return Abilities(True, True, True, True)
        with evaluation_mode(self.model):
            found = probe(self._forward, self.vocab_size, self.device, self.chunk, self.model)
        if found.cost() is not None:
            logging.getLogger(__name__).warning(
                f"{self.name} does not give the same logits in batches, in pieces or padded as alone and whole (tried on a few "
                f"tokens); for the right scores it reads {found.cost()}, which is slower"
            )
        return found

    # Writing.

    def _alike(self, order: list[int], prompts: list[list[int]]) -> Iterator[list[int]]:
        """Batches of prompts, longest first; of equal lengths where the model does not take padding exactly."""
        if self._abilities.pads:
            yield from self._batches(order, lambda i: len(prompts[i]))
            return
        for _, group in groupby(order, key=lambda i: len(prompts[i])):
            yield from self._batches(list(group), lambda i: len(prompts[i]))

    def _continue(self, prompts: list[list[int]], count: int, stop: tuple[str, ...]) -> list[str]:
        """The texts that follow a batch of prompts, as `generate`."""
        width = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            tokens[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = True
        tokens, padding = tokens.to(self.device), None if mask.all() else mask.to(self.device)
        written: list[list[int]] = [[] for _ in prompts]
        texts: list[str | None] = [None] * len(prompts)
        logits, cache = self._prefill(tokens, padding)
        for step in range(count):
            chosen = logits[:, -1].argmax(-1)
            *taken, broken = torch.cat((chosen, logits.isnan().any()[None])).tolist()  # one wait for the device
            if broken:
                raise ValueError(f"{self.name} gives logits that are not numbers; look at its weights, or evaluate in float32")
            for i, token in enumerate(taken):
                if texts[i] is None:
                    written[i].append(token)
                    texts[i] = self._ended(written[i], stop, last=step == count - 1)
            if all(text is not None for text in texts):
                break
            if padding is not None:
                padding = torch.cat((padding, padding.new_ones(len(prompts), 1)), 1)
            if self._abilities.steps:
                logits, cache = self._forward(chosen[:, None], cache, 1, mask=None if self.is_ours else padding)
            else:
                tokens = torch.cat((tokens, chosen[:, None]), 1)
                logits, cache = self._prefill(tokens, padding)
        return [text or "" for text in texts]

    def _prefill(self, tokens: Tensor, padding: Tensor | None) -> tuple[Tensor, Any]:
        """Logits of the last column and the cache behind left-padded prompts (B, T)."""
        width = tokens.shape[1]
        size = self.chunk if self._abilities.carries else width
        free = 0 if padding is None else width - int(padding.sum(1).min())  # from there on nothing is padding: ours need no mask
        logits, cache = tokens, None
        for a in range(0, width, size):
            b = min(a + size, width)
            mask = None if padding is None or (self.is_ours and a >= free) else padding[:, :b]
            logits, cache = self._forward(tokens[:, a:b], cache, 1, carry=b < width or self._abilities.steps, mask=mask)
        return logits, cache

    def _ended(self, written: list[int], stop: tuple[str, ...], *, last: bool) -> str | None:
        """The finished text, or None while it goes on."""
        ended = written[-1] == self.eos_id
        if not (ended or last or stop):
            return None
        text = str(self.tokenizer.decode(written[: len(written) - ended], skip_special_tokens=True))
        cut = min((place for place in (text.find(s) for s in stop) if place >= 0), default=None)
        return text[:cut] if cut is not None or ended or last else None


def _log_probabilities(logits: Tensor, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log p of targets (M,) at places (rows, columns) of logits (B, T, V), fp64 on the CPU; and whether each is the likeliest."""
    places, index = torch.unique(rows * logits.shape[1] + columns, return_inverse=True)
    device = logits.device
    picked = logits.flatten(0, 1)[places.to(device)].float()
    index, targets = index.to(device), targets.to(device)
    logs = picked[index, targets] - picked.logsumexp(-1)[index]
    return logs.double().cpu(), (picked.argmax(-1)[index] == targets).cpu()


def _windows(tokens: Tensor, limit: int | None) -> Iterator[tuple[Tensor, int]]:
    """Of a prefix and a document, whole or in windows: tokens to read, the last only predicted, and how many at the end to predict.

    Windows are those of lm-evaluation-harness (`get_rolling_token_windows` with one token of context): each token is predicted
    once, and the last window reaches back so that it is full.
    """
    length = len(tokens) - 1
    width = length if limit is None else min(limit, length)
    for begin in range(0, length, max(1, width)):
        end = min(begin + width, length)
        yield tokens[end - width : end + 1], end - begin
