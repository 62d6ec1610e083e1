"""The embedded corpus `pydoc`: the documentation prose inside every CPython. Read as text, nothing is imported or run."""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from proteus_lm.data.document import Document

# Tests, third-party packages and copies of them are no documentation of the standard library.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "__pycache__"}
_TOPICS = "pydoc_data/topics.py"
_TOPICS_LENGTH = 32_000  # characters; topics are joined to this length, about that of a large module
_Named = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ast.If | ast.Try | ast.ExceptHandler | ast.With | ast.For | ast.While  # they may hold definitions


class PythonDocs:
    """Docstrings of the standard library joined by top-level module or package, and the topics of the language reference.

    A docstring met a second time is left out: a copy in another module could stand on both sides of a split.

    Raises:
        FileNotFoundError: if this Python carries no sources of its standard library.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(sysconfig.get_path("stdlib"))
        files = (path.relative_to(self._root) for path in self._root.rglob("*.py"))
        kept = (path for path in files if not _LEFT_OUT.intersection(path.parts) and path.as_posix() != _TOPICS)
        self._files = sorted((path for path in kept if not path.parts[0].startswith("config-")), key=_module_order)
        if not self._files:
            raise FileNotFoundError(f"this Python has no sources of its standard library in {self._root}; give a text file instead")
        if (self._root / _TOPICS).is_file():
            self._files.insert(0, Path(_TOPICS))
        self.size: int | None = sum((self._root / path).stat().st_size for path in self._files)
        self.consumed, self.ignored = 0, dict[str, int]()

    def identity(self) -> dict[str, object]:
        """What the documents depend on: the Python version and the SHA-256 of the sources read."""
        digest = hashlib.sha256()
        for path in self._files:
            digest.update(f"{path.as_posix()}\0".encode())
            digest.update(hashlib.sha256((self._root / path).read_bytes()).digest())
        return {"kind": "pydoc", "python": platform.python_version(), "sha256": digest.hexdigest()}

    def documents(self) -> Iterator[Document]:
        """Topics first, then modules by name; the order depends on nothing but the sources."""
        self.consumed, seen = 0, set[str]()
        self.ignored.clear()
        for module, paths in groupby(self._files, key=_module):
            if module == "pydoc_data":
                yield from self._topics(list(paths))
                continue
            parts = [part for path in paths for part in self._docstrings(path, seen)]
            if parts:
                yield Document("\n\n\n".join(parts) + "\n", f"module {module}")

    def _parse(self, path: Path) -> ast.Module:
        source = (self._root / path).read_bytes()
        self.consumed += len(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            try:
                return ast.parse(source, str(path))
            except (SyntaxError, ValueError):
                self.ignored["files that do not parse"] = self.ignored.get("files that do not parse", 0) + 1
                return ast.Module([], [])

    def _topics(self, paths: list[Path]) -> Iterator[Document]:
        """Topics of `help()` in alphabetical order, joined to documents of some length."""
        for path in paths:
            tree = self._parse(path)
            tables = (node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
            topics = [item for table in tables if isinstance(table, ast.Dict) for item in ast.literal_eval(table).items()]
            parts, first = list[str](), ""
            for name, text in sorted(topics):
                parts, first = [*parts, text.strip()], first or name
                if sum(map(len, parts)) >= _TOPICS_LENGTH:
                    yield Document("\n\n\n".join(parts) + "\n", f"topics from {first}")
                    parts, first = [], ""
            if parts:
                yield Document("\n\n\n".join(parts) + "\n", f"topics from {first}")

    def _docstrings(self, path: Path, seen: set[str]) -> Iterator[str]:
        """The docstrings of a file in the order of its lines, each under the full name of what it describes."""
        parts = path.with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for name, node in _documented(self._parse(path), module):
            text = ast.get_docstring(node)
            if text and text not in seen:
                seen.add(text)
                yield f"{name}\n\n{text.strip()}"


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, _Named]]:
    """(full name, node) of a module and of all classes and functions in it, outer ones first, in the order of the lines."""
    if isinstance(node, _Named):
        yield name, node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(child, f"{name}.{child.name}")
        elif isinstance(child, _BLOCKS):
            yield from _documented(child, name)


def _module(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def _module_order(path: Path) -> tuple[str, str]:
    """A package's own docstring first, then its files by name."""
    name = path.as_posix()
    return _module(path), name.replace("__init__.py", "")
