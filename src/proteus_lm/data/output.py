"""The folder that `prepare` makes: made beside its place, put there whole, continued after an interruption."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from proteus_lm.data.files import WriteError, write_json, writing
from proteus_lm.data.shards import Manifest, Split
from proteus_lm.data.tokenizer import Tokenizer

_JOURNAL = "progress.json"


class Output:
    """The state of `out` and of the hidden folder beside it where the work goes on.

    Args:
        out: the folder to make.
        plan: a manifest without splits: what will be made, how and from what.
        say: prints a line for the user.
    """

    def __init__(self, out: Path, plan: Manifest, say: Callable[[str], None]) -> None:
        self.out = out.expanduser().resolve()
        self.partial = self.out.with_name(f".{self.out.name}.partial")
        self._retired = self.out.with_name(f".{self.out.name}.old")
        self._plan, self._say, self._splits = plan, say, dict[str, Split]()

    def reusable(self, *, overwrite: bool) -> Manifest | None:
        """The finished result of the same work, if `out` holds it and is not to be overwritten.

        Raises:
            FileExistsError: if `out` holds something else: other files, or data prepared in another way.
            ValueError: if a shard there is missing, cut short or changed, or its manifest cannot be read.
        """
        self._mend()
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return None
        if not (self.out / "manifest.json").is_file():
            raise FileExistsError(f"{self.out} is there and is not prepared data; it is left alone, choose another folder")
        if overwrite:
            return None
        found = Manifest.read(self.out)
        differences = _differences(found, self._plan)
        if differences:
            what = "; ".join(differences)
            raise FileExistsError(f"{self.out} was prepared in another way: {what}. Use --overwrite, or another folder")
        self._say(f"comparing the files of {self.out} with their SHA-256")
        found.verify()
        return found

    def _mend(self) -> None:
        """Settle a replacement of `out` that was killed between its two renames, or before its last clean-up."""
        if (self._retired / "manifest.json").is_file():
            if self.out.exists():
                shutil.rmtree(self._retired)
            else:
                self._retired.rename(self.out)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Own the working folder. On the way out after an error it is removed, unless whole shards are worth keeping.

        A failed write always removes it: the disk may be full.

        Raises:
            FileExistsError: if another process is preparing the same folder.
        """
        with writing(self.partial, 0):
            self.partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.partial, os.O_RDONLY)
        try:
            self._lock(lock)
            self._resume()
            try:
                yield
            except BaseException as error:
                if isinstance(error, WriteError) or not any(split.shards for split in self._splits.values()):
                    self.discard()
                elif self.partial.exists():
                    self._say(f"{self._whole()} whole shards are kept in {self.partial}; the same call goes on behind them")
                raise
        finally:
            os.close(lock)

    def _lock(self, descriptor: int) -> None:
        """Take the folder for this process; the system gives it back when the process ends, however it ends."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.fstat(descriptor).st_ino == self.partial.stat().st_ino
        except (BlockingIOError, FileNotFoundError):
            taken = False
        except OSError as error:  # a file system without locks: go on without
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF):
                raise
            taken = True
        if not taken:
            raise FileExistsError(f"another process is preparing {self.out} now; wait for it, or choose another folder")

    def _resume(self) -> None:
        """Keep the whole shards of an interrupted call of the same work; remove everything else in the working folder."""
        for name in (_JOURNAL, "manifest.json"):
            with suppress(ValueError, FileNotFoundError):
                found = Manifest.read(self.partial, name)
                if not _differences(replace(found, source=self._plan.source), self._plan):
                    found.verify()
                    self._splits = self._usable(found)
                    break
        shards = ((self.partial / name, shard) for name, split in self._splits.items() for shard in split.shards)
        kept = {path for folder, shard in shards for path, _, _ in shard.files(folder, self._plan.token_dtype)}
        self._remove_except(kept)
        if kept:
            self.save(self._splits)
            self._say(f"going on behind the {self._whole()} whole shards of an interrupted call")

    def _usable(self, found: Manifest) -> dict[str, Split]:
        """The shards to go on behind. The last one of a split may be short, which is right only where its source ended."""
        if not _differences(found, self._plan):
            return found.splits
        least = self._plan.options["shard_tokens"]
        full = {name: tuple(s for s in split.shards if s.tokens >= least) for name, split in found.splits.items()}
        return {name: Split(shards) for name, shards in full.items()}

    def clear(self) -> None:
        """Forget all shards: the work starts from its beginning."""
        self._splits = {}
        self._remove_except(set())

    def _remove_except(self, kept: set[Path]) -> None:
        for path in [path for path in self.partial.rglob("*") if path.is_file() and path not in kept]:
            path.unlink()

    def _whole(self) -> int:
        return sum(len(split.shards) for split in self._splits.values())

    def done(self, split: str) -> Split:
        """The whole shards of a split, from an earlier call and this one."""
        return self._splits.get(split, Split(()))

    def save(self, splits: dict[str, Split]) -> None:
        """Note which shards are whole."""
        self._splits = splits
        write_json(self.partial / _JOURNAL, replace(self._plan, splits=splits).to_dict())

    def finish(self, manifest: Manifest, tokenizer: Tokenizer) -> Manifest:
        """Complete the working folder and put it in the place of `out`."""
        tokenizer.save(self.partial)
        write_json(self.partial / "manifest.json", manifest.to_dict())
        (self.partial / _JOURNAL).unlink(missing_ok=True)
        with writing(self.out, 0):
            if self.out.exists():
                self.out.rename(self._retired)
            self.partial.rename(self.out)
        shutil.rmtree(self._retired, ignore_errors=True)
        return Manifest.read(self.out)

    def discard(self) -> None:
        """Remove the working folder."""
        shutil.rmtree(self.partial, ignore_errors=True)


def _differences(found: Manifest, plan: Manifest) -> list[str]:
    """What is not the same in two ways of preparing, for people to read. Names of the same thing do not count."""
    pairs = [
        *((f"source {key}", found.source.get(key), plan.source.get(key)) for key in _keys(found.source, plan.source, "spec")),
        *((f"tokenizer {key}", found.tokenizer.get(key), plan.tokenizer.get(key)) for key in ("hash", "eos_id")),
        *((key, found.options.get(key), plan.options.get(key)) for key in _keys(found.options, plan.options)),
        ("dtype", found.dtype, plan.dtype),
    ]
    return [f"{name} was {old!r}, now {new!r}" for name, old, new in pairs if old != new]


def _keys(a: dict[str, Any], b: dict[str, Any], *without: str) -> list[str]:
    return [key for key in dict.fromkeys([*a, *b]) if key not in without]
