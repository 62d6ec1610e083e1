"""A user's evaluation files: what an editor or a packer puts around the text is no text."""

from __future__ import annotations

import gzip

import pytest

from proteus_lm.evals.files import read_lines


@pytest.mark.parametrize(("name", "pack"), [("rows.jsonl", bytes), ("rows.jsonl.gz", gzip.compress)])
def test_a_byte_order_mark_is_no_text(tmp_path, name, pack):
    (tmp_path / name).write_bytes(pack(b'\xef\xbb\xbf{"a": 1}\r\n\n{"b": 2}\n'))
    assert list(read_lines(tmp_path / name)) == [(1, '{"a": 1}'), (3, '{"b": 2}')]
