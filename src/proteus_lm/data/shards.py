"""The format of prepared data: a folder of token shards with a manifest, and how its files come to be whole or not at all.

    manifest.json            what is here, how it was made, and the SHA-256 of every file of tokens
    tokenizer.json (+config) the tokenizer that made it
    train/, validation/      shard-00000.bin: token ids, little endian uint16 or uint32, no header, documents one after the other,
                             each with its end token; shard-00000.idx: int64 (documents + 1), where documents start in the shard
A document never spans two shards: a shard is closed by the document that reaches `shard_tokens`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from proteus_lm.data.files import write_whole, writing
from proteus_lm.data.record import sha256_once

FORMAT, VERSION = "proteus-tokens", 1
SPLITS = ("train", "validation")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class Shard:
    """One file of tokens. `bytes` counts the UTF-8 text, `tokens` the end tokens too; `longest` is in tokens.

    `text_sha256` is that of the texts, each behind its length as 8 bytes: it knows the documents without tokenizing them.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    longest: int
    sha256: str
    index_sha256: str
    text_sha256: str

    def files(self, folder: Path, dtype: np.dtype) -> Iterator[tuple[Path, int, str]]:
        """(path, size in bytes, SHA-256) of the two files of this shard."""
        yield folder / f"{self.name}.bin", self.tokens * dtype.itemsize, self.sha256
        yield folder / f"{self.name}.idx", (self.documents + 1) * 8, self.index_sha256


@dataclass(frozen=True)
class Split:
    """The shards of one split and their sums."""

    shards: tuple[Shard, ...]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Number of tokens, the end token of every document among them."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of UTF-8 text."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document, its end token among them."""
        return max((shard.longest for shard in self.shards), default=0)


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds and how it was made. Holds no time and no count of workers: the same work, the same bytes."""

    source: dict[str, Any]
    tokenizer: dict[str, Any]
    options: dict[str, Any]
    dtype: str
    splits: dict[str, Split]
    empty_documents: int = 0
    folder: Path = field(default=Path(), compare=False)

    @property
    def token_dtype(self) -> np.dtype:
        """The type of the ids in the shards."""
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """What manifest.json holds."""
        parts = {
            name: {
                "documents": split.documents,
                "tokens": split.tokens,
                "bytes": split.bytes,
                "longest_document": split.longest_document,
                "shards": [asdict(shard) for shard in split.shards],
            }
            for name, split in self.splits.items()
        }
        head = {"format": FORMAT, "version": VERSION, "dtype": self.dtype, "empty_documents": self.empty_documents}
        return head | {"source": self.source, "tokenizer": self.tokenizer, "options": self.options, "splits": parts}

    @staticmethod
    def read(folder: str | Path, name: str = "manifest.json") -> Manifest:
        """The manifest of a prepared folder; `name` is another one only for work in progress.

        Raises:
            FileNotFoundError: if the folder holds none.
            ValueError: if it is not one of ours, or of another version of the format.
        """
        path = Path(folder) / name
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is not prepared data: it has no {name}; make it with proteus prepare")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT or data["version"] != VERSION:
                found = f"{data['format']} version {data['version']}"
                raise ValueError(f"it is {found}, this program reads {FORMAT} version {VERSION}; prepare the data again")
            splits = {key: Split(tuple(Shard(**shard) for shard in part["shards"])) for key, part in data["splits"].items()}
            kept = {key: data[key] for key in ("source", "tokenizer", "options", "dtype", "empty_documents")}
            return Manifest(**kept, splits=splits, folder=Path(folder))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest of prepared data: {error}") from error

    def check_sizes(self) -> None:
        """Compare the size of every file with the manifest (cheap: reads no content).

        Raises:
            ValueError: naming a file that is missing, cut short or too long.
        """
        for path, size, _ in self._files():
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"holds {found} bytes"
                raise ValueError(f"{path} {state}; its manifest says {size} bytes. Copy it again or prepare with overwrite")

    def verify(self, split: str | None = None) -> None:
        """Compare the SHA-256 of every file, or of those of one split, with the manifest (reads them), and the sizes of all.

        Raises:
            ValueError: naming the first file that differs.
        """
        self.check_sizes()
        for path, _, digest in self._files(split):
            if sha256_once(path) != digest:
                raise ValueError(f"{path} is damaged: its SHA-256 is not the manifest's. Copy it again or prepare with overwrite")

    def size(self, split: str) -> int:
        """Bytes of the files of a split."""
        return sum(size for _, size, _ in self._files(split))

    def _files(self, split: str | None = None) -> Iterator[tuple[Path, int, str]]:
        """(path, size in bytes, SHA-256) of every file, or of those of one split."""
        for name in self.splits if split is None else (split,):
            for shard in self.splits[name].shards:
                yield from shard.files(self.folder / name, self.token_dtype)


class ShardWriter:
    """Writes the documents of one split into shards, one whole shard after the other.

    Args:
        folder: where the shards go; made at the first document.
        dtype: "uint16" or "uint32".
        vocab_size: every id must be below.
        shard_tokens: a shard is closed by the document that reaches this number of tokens.
        done: shards of this folder that an earlier, interrupted call has finished.
        on_shard: called after a shard has reached the disk.
    """

    def __init__(
        self, folder: Path, dtype: str, vocab_size: int, shard_tokens: int, done: Split, on_shard: Callable[[], None]
    ) -> None:
        self.folder, self.dtype, self.vocab_size, self.shard_tokens = folder, DTYPES[dtype], vocab_size, shard_tokens
        self.shards, self._on_shard = list(done.shards), on_shard
        self._bin: IO[bytes] | None = None
        self._begin()

    def _begin(self) -> None:
        self._name = f"shard-{len(self.shards):05d}"
        self._bounds, self._bytes, self._hash, self._texts = [0], 0, hashlib.sha256(), hashlib.sha256()

    def add(self, ids: np.ndarray, text: bytes) -> None:
        """Append one document: ids (tokens,) with its end token, and the UTF-8 text that they come from.

        Raises:
            ValueError: for an id that the vocabulary or the dtype cannot hold.
            WriteError: if the disk does not take it.
        """
        top, limit = int(ids.max()), min(self.vocab_size, int(np.iinfo(self.dtype).max) + 1)
        if top >= limit:
            raise ValueError(f"token id {top} does not fit: vocabulary {self.vocab_size}, {self.dtype.name} shards; use uint32")
        data = ids.astype(self.dtype).tobytes()
        path = self.folder / f"{self._name}.bin"
        with writing(path, len(data)):
            if self._bin is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._bin = path.open("wb")
            self._bin.write(data)
        self._hash.update(data)
        self._bounds.append(self._bounds[-1] + len(ids))
        self._bytes += len(text)
        _add_text(self._texts, text)
        if self._bounds[-1] >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Close the open shard, if there is one: its two files are on the disk when this returns."""
        if self._bin is None:
            return
        with writing(self.folder / f"{self._name}.bin", self._bounds[-1] * self.dtype.itemsize):
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._bin.close()
        self._bin = None
        bounds = np.array(self._bounds, "<i8")
        write_whole(self.folder / f"{self._name}.idx", bounds.tobytes())
        lengths, index = np.diff(bounds), hashlib.sha256(bounds.tobytes()).hexdigest()
        self.shards.append(
            Shard(
                name=self._name,
                documents=len(lengths),
                tokens=int(bounds[-1]),
                bytes=self._bytes,
                longest=int(lengths.max()),
                sha256=self._hash.hexdigest(),
                index_sha256=index,
                text_sha256=self._texts.hexdigest(),
            )
        )
        self._begin()
        self._on_shard()

    def abandon(self) -> None:
        """Close the open file after a failure, whatever the disk says."""
        if self._bin is not None:
            with suppress(OSError):
                self._bin.close()
            self._bin = None


class SourceChanged(Exception):
    """The source no longer begins with the documents of the shards that an interrupted call made of it."""


class Replay:
    """Meets the documents of whole shards again in their source, and makes sure that they are the same.

    Args:
        done: the whole shards of a split.
    """

    def __init__(self, done: Split) -> None:
        self._shards = list(done.shards[::-1])
        self._documents, self._texts = 0, hashlib.sha256()

    @property
    def complete(self) -> bool:
        """Whether all documents of the shards have been met."""
        return not self._shards

    def covers(self, text: bytes) -> bool:
        """Whether the next document of the split, as UTF-8, is in a whole shard already.

        Raises:
            SourceChanged: at the last document of a shard whose texts were others.
        """
        if not self._shards:
            return False
        _add_text(self._texts, text)
        self._documents += 1
        if self._documents == self._shards[-1].documents:
            if self._texts.hexdigest() != self._shards.pop().text_sha256:
                raise SourceChanged
            self._documents, self._texts = 0, hashlib.sha256()
        return True


def _add_text(digest: hashlib._Hash, text: bytes) -> None:
    digest.update(len(text).to_bytes(8, "little"))
    digest.update(text)
