"""The embedded corpus: Python's own documentation."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from proteus_lm.data.dataset import TokenDataset
from proteus_lm.data.prepare import prepare
from proteus_lm.data.python_docs import PythonDocs
from proteus_lm.data.shards import Manifest


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    return prepare("pydoc", "byte", tmp_path_factory.mktemp("pydoc") / "out", progress=False)


@pytest.fixture(scope="module")
def texts(manifest) -> list[str]:
    splits = [TokenDataset(manifest.folder, name) for name in ("train", "validation")]
    return [data.tokenizer.decode(data.document(i)[:-1]) for data in splits for i in range(data.documents)]


def test_it_is_megabytes_of_prose_in_long_documents_with_a_validation_split(manifest, texts):
    lengths = [len(text.encode()) for text in texts]
    assert sum(lengths) > 1_500_000
    assert len(texts) > 100 and np.mean(lengths) > 8_000 and max(lengths) > 60_000
    assert manifest.splits["validation"].bytes > 10_000


def test_topics_and_docstrings_are_in_it_once(texts):
    text = "".join(texts)
    assert text.count('The "assert" statement\n') == 1
    assert text.count("\n\njson.decoder.JSONDecoder.raw_decode\n\nDecode a JSON document") == 1


def test_nothing_is_imported(texts):
    documented = {text.split(maxsplit=1)[0] for text in texts} & sys.stdlib_module_names
    assert len(documented - {*sys.modules}) > 10
    assert not {"turtledemo", "antigravity", "this"} & set(sys.modules)


def test_order_names_and_joining_follow_the_sources(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "test" / "t.py").write_text('"""Left out."""')
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'with': 'The with.', 'assert': 'The assert.'}")
    (tmp_path / "pack" / "__init__.py").write_text('"""Package."""')
    (tmp_path / "pack" / "a.py").write_text(
        '"""Module."""\nif True:\n    class C:\n        """Class."""\n        async def f(self):\n            """Twice."""\n'
        'def g():\n    """Twice."""\ndef h():\n    r"""Indented.\n\n    less\n        more\n    """\n'
    )
    (tmp_path / "alone.py").write_text('"""Alone."""')
    (tmp_path / "bad.py").write_text("print 'old'")
    (tmp_path / "silent.py").write_text("x = 1")
    source = PythonDocs(tmp_path)
    assert [tuple(document) for document in source.documents()] == [
        ("The assert.\n\n\nThe with.\n", "topics from assert"),
        ("alone\n\nAlone.\n", "module alone"),
        (
            "pack\n\nPackage.\n\n\npack.a\n\nModule.\n\n\npack.a.C\n\nClass.\n\n\npack.a.C.f\n\nTwice.\n\n\n"
            "pack.a.h\n\nIndented.\n\nless\n    more\n",
            "module pack",
        ),
    ]
    assert source.ignored == {"files that do not parse": 1} and source.consumed == source.size


def test_a_python_without_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no sources of its standard library.*give a text file"):
        PythonDocs(tmp_path)
