"""Where documents come from: files and folders (text, JSON lines, Parquet), the hub, and Python's own documentation."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from proteus_lm.data.document import Document, Source, decode, text_field
from proteus_lm.data.files import file_sha256
from proteus_lm.data.python_docs import PythonDocs

_COMPRESSED = {".gz", ".xz", ".zst"}
_JSONL = {".jsonl", ".ndjson"}
_PROSE = {".txt", ".text", ".md", ".markdown", ".rst", ".org", ".tex", ".adoc"}
_CODE = {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts", ".sh"}
_IN_FOLDERS = _JSONL | _PROSE | _CODE | {".parquet"}
_MARK = b"\xef\xbb\xbf"  # a byte order mark is no text
_ALL = "text, .jsonl (plain, .gz, .xz, .zst) or .parquet"
_DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)


def open_source(
    spec: str | Path,
    *,
    field: str = "text",
    separator: str | None = None,
    errors: str = "strict",
    hub_config: str | None = None,
    hub_split: str = "train",
) -> Source:
    """The source that `spec` names: "pydoc", a file, a folder (searched to the bottom), or a data set on the hub.

    Args:
        spec: "pydoc" is always the embedded corpus (write ./pydoc for a folder of that name). What exists here is a file
            or folder; else a name such as "owner/name" is looked for on the hub.
        field: which field of a JSON line, Parquet row or hub row is the text.
        separator: cuts text files into documents, e.g. "<|endoftext|>"; without it a text file is one document.
        errors: "strict", or "replace" to put U+FFFD for bytes that are not UTF-8.
        hub_config, hub_split: which part of a hub data set.

    Raises:
        FileNotFoundError: if there is no such file, folder or data set.
        ValueError: for a source without any readable file, or an option that does not apply to it.
    """
    if errors not in ("strict", "replace"):
        raise ValueError(f"errors is {errors!r}; it must be strict or replace")
    if separator == "":
        raise ValueError("the separator is empty; give the string that stands between two documents, or none")
    path = Path(spec).expanduser()
    embedded, local = str(spec) == "pydoc", path.exists()
    if hub_config is not None and (embedded or local):
        raise ValueError(f"hub_config={hub_config!r} is for data sets on the hub; {spec} is not one")
    if separator is not None and (embedded or not local):
        raise ValueError(f"separator={separator!r} is for text files; {spec} is not one")
    if embedded:
        return PythonDocs()
    if local:
        return Files(path, field=field, separator=separator, errors=errors)
    if not _may_be_hub_name(str(spec)):
        raise FileNotFoundError(f"no source {spec}: no such file or folder; give {_ALL}, a folder of them, a hub name, or pydoc")
    from proteus_lm.data.hub import HubDataset

    return HubDataset(str(spec), config=hub_config, split=hub_split, field=field, errors=errors)


class Files:
    """A file, or the readable files of a folder and all folders in it, in the order of their names.

    Hidden files and files of other kinds are left out of a folder; `ignored` counts the latter by suffix.

    Raises:
        ValueError: if there is nothing to read.
    """

    def __init__(self, path: Path, *, field: str = "text", separator: str | None = None, errors: str = "strict") -> None:
        self._path, self._field, self._separator, self._errors = path, field, separator, errors
        self._root = path if path.is_dir() else path.parent
        self.ignored: dict[str, int] = {}
        self._files = self._find() if path.is_dir() else [path]
        self.size: int | None = sum(file.stat().st_size for file in self._files)
        self.consumed = 0
        if not self._files:
            raise ValueError(f"the folder {path} holds nothing to read ({_ALL}); it has {self.ignored or 'no files'}")
        if self.size == 0:
            raise ValueError(f"the source {path} is empty: 0 bytes; give one with text")
        if separator is not None and not any(_kind(file) == "text" for file in self._files):
            raise ValueError(f"separator={separator!r} is for text files; {path} holds none")

    def _find(self) -> list[Path]:
        found = list[tuple[str, Path]]()
        for file in self._path.rglob("*"):
            name = file.relative_to(self._path)
            if any(part.startswith(".") for part in name.parts) or not file.is_file():
                continue
            suffix = _suffix(file)
            if suffix in _IN_FOLDERS:
                found.append((name.as_posix(), file))
            else:
                self.ignored[suffix] = self.ignored.get(suffix, 0) + 1
        return [file for _, file in sorted(found)]

    def identity(self) -> dict[str, object]:
        """Names below the folder and SHA-256 of all files: it stays the same where the folder is moved."""
        digest = hashlib.sha256()
        for file in self._files:
            digest.update(f"{file.relative_to(self._root).as_posix()}\0{file_sha256(file)}\n".encode())
        return {"kind": "files", "files": len(self._files), "bytes": self.size, "sha256": digest.hexdigest()}

    def documents(self) -> Iterator[Document]:
        """All documents.

        Raises:
            ValueError: naming file and place of what cannot be read.
        """
        self.consumed = 0
        for file in self._files:
            start, kind = self.consumed, _kind(file)
            yield from self._parquet(file) if kind == "parquet" else self._stream(file, kind)
            self.consumed = start + file.stat().st_size

    def _stream(self, file: Path, kind: str) -> Iterator[Document]:
        start = self.consumed
        with file.open("rb") as raw:
            stream = _decompressed(file, raw)
            try:
                for document in self._lines(file, stream) if kind == "jsonl" else self._text(file, stream):
                    self.consumed = start + raw.tell()
                    yield document
            except _DAMAGE as error:
                raise ValueError(f"{file} is damaged or cut short: {error or type(error).__name__}; get it again") from error

    def _text(self, file: Path, stream: IO[bytes]) -> Iterator[Document]:
        data = stream.read()
        mark = len(_MARK) if data.startswith(_MARK) else 0
        text = decode(data[mark:], self._errors, str(file), mark)
        if self._separator is None:
            yield Document(text, str(file))
            return
        for index, part in enumerate(text.split(self._separator)):
            yield Document(part, f"{file} document {index}")

    def _lines(self, file: Path, stream: IO[bytes]) -> Iterator[Document]:
        offset = 0
        for number, line in enumerate(stream, 1):
            mark = len(_MARK) if number == 1 and line.startswith(_MARK) else 0
            if line[mark:].strip():
                where = f"{file} line {number}"
                text = decode(line[mark:], self._errors, where, offset + mark)
                yield Document(text_field(_json_row(text, where), self._field, where, self._errors), where)
            offset += len(line)

    def _parquet(self, file: Path) -> Iterator[Document]:
        for where, value in self._values(file):
            yield Document(text_field({self._field: value}, self._field, where, self._errors), where)

    def _values(self, file: Path) -> Iterator[tuple[str, Any]]:
        """The field of each row of a Parquet file, and where it stands."""
        import pyarrow
        import pyarrow.parquet

        try:
            table, start = pyarrow.parquet.ParquetFile(file), self.consumed
            if self._field not in table.schema_arrow.names:
                raise ValueError(f"it has no column {self._field!r}; columns: {table.schema_arrow.names}; choose one with --field")
            row, total = 0, max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=256, columns=[self._field]):
                for value in batch.column(0):
                    row += 1
                    yield f"{file} row {row}", value.as_py()
                self.consumed = start + file.stat().st_size * row // total
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            raise ValueError(f"{file}: {error}") from error


def _json_row(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; one JSON object a line is needed") from error


def _suffix(file: Path) -> str:
    """The suffix that says the kind: ".jsonl" of a.jsonl.gz, "" of a.gz."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _kind(file: Path) -> str:
    suffix = _suffix(file)
    if suffix in _JSONL | {".json"}:
        return "jsonl"
    return "parquet" if suffix == ".parquet" else "text"


def _decompressed(file: Path, raw: IO[bytes]) -> IO[bytes]:
    match file.suffix.lower():
        case ".gz":
            return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
        case ".xz":
            return lzma.LZMAFile(raw)
        case ".zst":
            return io.BufferedReader(_Zstd(raw), 1 << 20)
    return raw


class _Zstd(io.RawIOBase):
    """Zstandard frames one after the other; raises EOFError in a frame cut short, where the library's reader says nothing."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw, self._ready, self._rest = raw, b"", b""
        self._frame: Any = None

    def readable(self) -> bool:
        """Always: it is a reader."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with decompressed bytes; 0 at the end."""
        while not self._ready:
            chunk = self._rest or self._raw.read(1 << 17)
            self._rest = b""
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends inside a zstandard frame")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(chunk)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _may_be_hub_name(spec: str) -> bool:
    """Whether a name can be one of the hub: "name" or "owner/name", and not the name of a data file."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", spec) is not None and _suffix(Path(spec)) not in _IN_FOLDERS | {".json"}
