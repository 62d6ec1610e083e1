"""Prepared data, read: the documents of one split as ids, and any stretch of their stream."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from proteus_lm.data.shards import Manifest, Shard
from proteus_lm.data.tokenizer import Tokenizer, load_tokenizer

COMPARED = 2 << 30
"""Bytes of a split up to which opening it compares its content with the manifest: some seconds at most."""


class TokenDataset:
    """One split of a folder made by `prepare`. Shards are memory-mapped when they are first read.

    Opening compares the size of every file with the manifest and, in a split of up to `COMPARED` bytes, its SHA-256; that the
    content of a larger one was not compared is said, and `verify` does it.

    The stream of a split is all its documents one after the other, each with its end token.

    Args:
        path: the prepared folder.
        split: "train" or "validation".

    Raises:
        FileNotFoundError: if the folder is not prepared data.
        ValueError: for a split that is not there, or a file that is not the manifest's (missing, cut short, changed).
    """

    def __init__(self, path: str | Path, split: str = "train") -> None:
        self.manifest, self.path, self.split = Manifest.read(path), Path(path), split
        if split not in self.manifest.splits:
            has = ", ".join(self.manifest.splits)
            raise ValueError(f"{path} has no split {split!r} (it has: {has}); prepare it with a validation_fraction above 0")
        self._compare()
        self._shards = self.manifest.splits[split].shards
        firsts = np.cumsum([0, *(shard.tokens for shard in self._shards)])
        self._firsts: np.ndarray = firsts  # place in the stream where each shard begins, and the end
        indices = [self._index(shard) for shard in self._shards]
        parts = [first + index[:-1] for first, index in zip(firsts, indices)]
        self._bounds = np.concatenate([*parts, firsts[-1:]]).astype(np.int64)
        self._maps: dict[int, np.ndarray] = {}

    def _compare(self) -> None:
        size = self.manifest.size(self.split)
        if size <= COMPARED:
            self.manifest.verify(self.split)
            return
        self.manifest.check_sizes()
        logging.getLogger(__name__).warning(
            f"the {self.split} split of {self.path} holds {size / 2**30:.1f} GiB: only the sizes of its files were compared with "
            "its manifest; the same proteus prepare again, or TokenDataset.verify(), compares their content"
        )

    def _index(self, shard: Shard) -> np.ndarray:
        """Where documents start in a shard, int64 (documents + 1)."""
        file = self.path / self.split / f"{shard.name}.idx"
        index = np.fromfile(file, "<i8")
        if index[0] != 0 or index[-1] != shard.tokens or (np.diff(index) < 1).any():
            raise ValueError(f"{file} is damaged: document starts must rise from 0 to {shard.tokens}; prepare with overwrite")
        return index

    @property
    def tokens(self) -> int:
        """Tokens in the stream, end tokens among them."""
        return int(self._bounds[-1])

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._bounds) - 1

    @property
    def bytes(self) -> int:
        """Bytes of UTF-8 text behind the tokens: divide by it for bits per byte."""
        return self.manifest.splits[self.split].bytes

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document, its end token among them."""
        return self.manifest.splits[self.split].longest_document

    @property
    def document_starts(self) -> np.ndarray:
        """Place in the stream of every document's first token and, last, the end: int64 (documents + 1)."""
        return self._bounds

    def document(self, index: int) -> np.ndarray:
        """Ids of one document with its end token, int64 (tokens,).

        Raises:
            IndexError: for an index that is not in 0 .. documents - 1.
        """
        if not 0 <= index < self.documents:
            raise IndexError(f"document {index} of {self.documents}: count from 0 to {self.documents - 1}")
        return self.read(int(self._bounds[index]), int(self._bounds[index + 1]))

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids start .. stop - 1 of the stream, int64 (stop - start,).

        Raises:
            IndexError: for places outside the stream.
            ValueError: for an id that the tokenizer does not have: the shard is damaged.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of {self.tokens}: 0 <= start <= stop <= {self.tokens} is needed")
        ids, shard = np.empty(stop - start, np.int64), int(np.searchsorted(self._firsts, start, "right")) - 1
        place = start
        while place < stop:
            first, end = int(self._firsts[shard]), min(stop, int(self._firsts[shard + 1]))
            part = ids[place - start : end - start]
            part[:] = self._map(shard)[place - first : end - first]
            self._check_ids(part, self._shards[shard].name)
            place, shard = end, shard + 1
        return ids

    def _check_ids(self, ids: np.ndarray, shard: str) -> None:
        vocabulary = self.manifest.tokenizer["vocab_size"]
        if ids.max() >= vocabulary:
            raise ValueError(
                f"{self.path / self.split / shard}.bin is damaged: it holds the id {ids.max()}, and its tokenizer has {vocabulary} "
                "tokens. Copy it again or prepare with overwrite"
            )

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            file = self.path / self.split / f"{self._shards[shard].name}.bin"
            self._maps[shard] = np.memmap(file, self.manifest.token_dtype, "r")
        return self._maps[shard]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the shards, from the folder itself.

        Raises:
            ValueError: if the file there is another one than the manifest names.
        """
        found, made_with = load_tokenizer(self.path), self.manifest.tokenizer
        if found.hash != made_with["hash"]:
            raise ValueError(
                f"{self.path}/tokenizer.json (hash {found.hash[:12]}, {found.vocab_size} tokens) is not the tokenizer that made "
                f"the shards beside it: {made_with['name']} (hash {made_with['hash'][:12]}, {made_with['vocab_size']} tokens); "
                "put that one back, or prepare the data again with overwrite"
            )
        return found

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError unless `tokenizer` is the one that made the shards."""
        made_with = self.manifest.tokenizer
        if tokenizer.hash != made_with["hash"]:
            raise ValueError(
                f"{self.path} was made with the tokenizer {made_with['name']} (hash {made_with['hash'][:12]}, "
                f"{made_with['vocab_size']} tokens), not with {tokenizer.name} (hash {tokenizer.hash[:12]}, "
                f"{tokenizer.vocab_size} tokens); use {self.path}/tokenizer.json, or prepare the data again with that one"
            )

    def verify(self) -> None:
        """Compare the SHA-256 of every shard of every split with the manifest, whatever its size.

        Raises:
            ValueError: naming the first file that differs.
        """
        self.manifest.verify()
