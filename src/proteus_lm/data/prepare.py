"""From text to token shards: `prepare`. The same source, tokenizer and options give the same bytes, whatever the workers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from proteus_lm.data.document import Source
from proteus_lm.data.output import Output
from proteus_lm.data.parallel import tokenized
from proteus_lm.data.progress import PrepareProgress
from proteus_lm.data.shards import DTYPES, SPLITS, Manifest, Replay, ShardWriter, SourceChanged, Split
from proteus_lm.data.sources import open_source
from proteus_lm.data.tokenizer import Tokenizer, load_tokenizer

_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 256  # what one call of a worker gets: some tenths of a second of work
_WORTH_WORKERS = 64 << 20  # bytes; below, starting processes takes longer than the work
_MANY_CORES = 4


def prepare(
    source: str | Path,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    field: str = "text",
    separator: str | None = None,
    errors: str = "strict",
    hub_config: str | None = None,
    hub_split: str = "train",
    max_documents: int | None = None,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    shard_tokens: int = 100_000_000,
    dtype: str = "auto",
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Manifest:
    """Turn documents into token shards that `TokenDataset` reads.

    Documents are split by a hash of their text, so equal texts never stand on both sides. Work goes into a hidden folder beside
    `out`, which becomes `out` at the end. If it is interrupted, the same call later goes on behind the last whole shard, also when
    the source was mended or grew behind the documents of that shard.

    Args:
        source: "pydoc", a text file, a folder, JSON lines (plain, .gz, .xz, .zst), Parquet, or the name of a data set on the hub.
        tokenizer: "byte", a tokenizer.json, a folder, a name on the hub, or a Tokenizer.
        out: the folder to make. If it holds the result of the same call already, that is compared with its SHA-256 and used.
        field: which field of a row is the text.
        separator: cuts text files into documents; without it a text file is one document.
        errors: "strict", or "replace" to put U+FFFD for bytes that are not UTF-8.
        hub_config, hub_split: which part of a data set on the hub.
        max_documents: stop after this number of documents.
        validation_fraction: share of documents for validation, 0 <= share < 1; 0 makes no validation split.
        split_seed: another seed, another choice of documents.
        shard_tokens: a shard is closed by the document that reaches this number of tokens.
        dtype: "uint16", "uint32", or "auto" for the smallest that holds the vocabulary.
        workers: processes that tokenize; 0 works in this process; None chooses by the size of the source. More than 0 needs
            the usual `if __name__ == "__main__":` in a script.
        overwrite: replace what `out` holds, if it is prepared data.
        progress: say on standard error how far it is: a bar on a terminal, lines elsewhere.

    Returns:
        The manifest of the finished folder.

    Raises:
        FileNotFoundError: for a source or tokenizer that is not there.
        FileExistsError: if `out` holds something else; what differs is named.
        ValueError: for options outside their range, text that cannot be read, a split without documents, ids too large; for
            files of an earlier result that are not as they were written.
        OSError: if the disk takes no more; `out` is then as it was before.
        RuntimeError: if a worker process dies.
    """
    _check_numbers(validation_fraction, split_seed, shard_tokens, max_documents, workers)
    made_with = load_tokenizer(tokenizer)
    opened = open_source(source, field=field, separator=separator, errors=errors, hub_config=hub_config, hub_split=hub_split)
    options = {
        "field": field,
        "separator": separator,
        "errors": errors,
        "max_documents": max_documents,
        "validation_fraction": float(validation_fraction),
        "split_seed": split_seed,
        "shard_tokens": shard_tokens,
    }
    plan = Manifest(
        source={"spec": str(source)} | opened.identity(),
        tokenizer={
            "name": made_with.name,
            "hash": made_with.hash,
            "vocab_size": made_with.vocab_size,
            "eos_id": made_with.eos_id,
        },
        options=options,
        dtype=_choose_dtype(dtype, made_with),
        splits={},
    )
    with PrepareProgress(opened.size, shown=progress) as shown:
        output = Output(Path(out), plan, shown.say)
        present = output.reusable(overwrite=overwrite)
        if present is not None:
            shown.say(f"{out} holds the result of this call already; it is used as it is")
            return present
        processes = _choose_workers(workers, opened, made_with)
        with output.open():
            try:
                manifest = _Work(opened, made_with, plan, output, shown).run(processes)
            except SourceChanged:
                shown.say("the source has changed since the interrupted call: starting from its beginning")
                output.clear()
                manifest = _Work(opened, made_with, plan, output, shown).run(processes)
            return output.finish(manifest, made_with)


class _Work:
    """One pass over the documents of a source."""

    def __init__(self, source: Source, tokenizer: Tokenizer, plan: Manifest, output: Output, progress: PrepareProgress) -> None:
        self._source, self._tokenizer, self._plan, self._output = source, tokenizer, plan, output
        self._progress = progress
        self._documents = self._empty = 0
        self._lowest: list[float] = []  # the two smallest places of documents, to name a fraction that works
        names = SPLITS if plan.options["validation_fraction"] else SPLITS[:1]
        self._replays = {name: Replay(output.done(name)) for name in names}
        self._writers = {name: self._writer(name) for name in names}

    def _writer(self, split: str) -> ShardWriter:
        return ShardWriter(
            self._output.partial / split,
            self._plan.dtype,
            self._tokenizer.vocab_size,
            self._plan.options["shard_tokens"],
            self._output.done(split),
            lambda: self._output.save(self._splits()),
        )

    def _splits(self) -> dict[str, Split]:
        return {name: Split(tuple(writer.shards)) for name, writer in self._writers.items()}

    def run(self, workers: int) -> Manifest:
        """Read, tokenize and write all documents that no whole shard holds yet; say what has been made.

        Raises:
            ValueError: if there was no text, or a split got no document; the working folder is removed then.
            SourceChanged: if shards of an interrupted call are of other documents.
        """
        try:
            with closing(tokenized(self._batches(), self._tokenizer, workers)) as done:
                for splits, texts, rows in done:
                    for split, text, ids in zip(splits, texts, rows):
                        self._writers[split].add(np.append(ids, self._tokenizer.eos_id), text.encode())
                    tokens = sum(map(len, rows)) + len(rows)
                    self._progress.update(self._source.consumed, len(rows), tokens, sum(map(len, texts)))
            if not all(replay.complete for replay in self._replays.values()):
                raise SourceChanged
            for writer in self._writers.values():
                writer.flush()
        finally:
            for writer in self._writers.values():
                writer.abandon()
        for kind, count in self._source.ignored.items():
            self._progress.say(f"left out: {count} {kind or 'files without suffix'}")
        problem = self._problem()
        if problem:
            self._output.discard()
            raise ValueError(problem)
        return replace(self._plan, splits=self._splits(), empty_documents=self._empty)

    def _batches(self) -> Iterator[tuple[list[str], list[str]]]:
        """(splits, texts) in batches, in the order of the documents."""
        splits, texts, characters = list[str](), list[str](), 0
        for split, text in self._assigned():
            splits.append(split)
            texts.append(text)
            characters += len(text)
            if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
                yield splits, texts
                splits, texts, characters = [], [], 0
        if texts:
            yield splits, texts

    def _assigned(self) -> Iterator[tuple[str, str]]:
        """(split, text) of the documents that no whole shard holds yet."""
        fraction, seed = self._plan.options["validation_fraction"], self._plan.options["split_seed"]
        limit = self._plan.options["max_documents"]
        for document in self._source.documents():
            if limit is not None and self._documents >= limit:
                return
            if not document.text:
                self._empty += 1
                continue
            self._documents += 1
            text = document.text.encode()
            place = document_place(text, seed)
            self._lowest = sorted({*self._lowest, place})[:2]
            split = "validation" if place < fraction else "train"
            if not self._replays[split].covers(text):
                yield split, document.text

    def _problem(self) -> str | None:
        """What is wrong with the finished work, with a remedy; None if nothing is."""
        spec, fraction = self._plan.source["spec"], self._plan.options["validation_fraction"]
        if not self._documents:
            return f"the source {spec} is empty: it has no text ({self._empty} empty documents); give one with text"
        empty = [name for name, writer in self._writers.items() if not writer.shards]
        if not empty:
            return None
        if len(self._lowest) < 2:
            return (
                f"the source {spec} has {self._documents} document(s), all of one text: it cannot be split by document; "
                "set validation_fraction=0 (--validation-fraction 0), give more documents, or cut a text file with separator"
            )
        works = sum(self._lowest) / 2
        return (
            f"the {empty[0]} split would be empty: of {self._documents} documents none falls there with "
            f"validation_fraction={fraction}, split_seed={self._plan.options['split_seed']}; "
            f"validation_fraction={works:.6f} would put one in validation, "
            "or try another split_seed (--validation-fraction, --split-seed)"
        )


def document_place(text: bytes, seed: int) -> float:
    """Where in [0, 1) a document stands: a keyed BLAKE2b hash of its UTF-8 text. Validation is what lies below the fraction."""
    digest = hashlib.blake2b(text, digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def _check_numbers(fraction: float, seed: int, shard_tokens: int, documents: int | None, workers: int | None) -> None:
    """Raises ValueError for a number outside its range."""
    if not 0 <= fraction < 1:
        raise ValueError(f"validation_fraction is {fraction}; it must be at least 0 and less than 1")
    if abs(seed) >= 2**63:
        raise ValueError(f"split_seed is {seed}; it must fit 64 bits")
    for name, value, least in (
        ("shard_tokens", shard_tokens, 1),
        ("max_documents", documents, 1),
        ("workers", workers, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def _choose_dtype(dtype: str, tokenizer: Tokenizer) -> str:
    """The name of the shards' type; raises ValueError if it cannot hold the vocabulary."""
    if dtype == "auto":
        return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be auto, {' or '.join(DTYPES)}")
    if tokenizer.vocab_size > np.iinfo(DTYPES[dtype]).max + 1:
        raise ValueError(f"the {tokenizer.vocab_size} tokens of {tokenizer.name} do not fit {dtype}; use uint32 or auto")
    return dtype


def _choose_workers(workers: int | None, source: Source, tokenizer: Tokenizer) -> int:
    """Processes for the work: none where starting them costs more than it saves, or few cores are to be had.

    In one process `tokenizers` already works on the texts of a batch in parallel threads; on 2 cores that was faster.
    """
    if workers is not None:
        return workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    small = source.size is not None and source.size < _WORTH_WORKERS
    return 0 if tokenizer.is_bytes or small or cores < _MANY_CORES else cores - 1
