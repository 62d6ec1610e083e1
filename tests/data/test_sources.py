"""Where documents come from: every format, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from proteus_lm.data.sources import open_source

TEXTS = ["one\r\ntwo", "caf\u00e9 \U0001f600 \x00", "line \u2028 separator", "last"]
ROWS = "".join(json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(TEXTS)).encode()


def two_frames(data: bytes) -> bytes:
    """Zstandard data in two frames, as `cat a.zst b.zst` makes them."""
    compressor, middle = zstandard.ZstdCompressor(), len(data) // 2
    return compressor.compress(data[:middle]) + compressor.compress(data[middle:])


PACKED = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": two_frames}


def texts(spec, **options) -> list[str]:
    return [document.text for document in open_source(spec, **options).documents()]


@pytest.mark.parametrize("suffix", PACKED)
def test_json_lines_are_read_plain_and_packed(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACKED[suffix](ROWS + b"\n  \n"))
    assert texts(path) == TEXTS


@pytest.mark.parametrize("suffix", PACKED)
def test_a_text_file_is_one_document_plain_and_packed(tmp_path, suffix):
    path = tmp_path / f"book.txt{suffix}"
    path.write_bytes(PACKED[suffix]("\ufeffone\r\ntwo \x00 caf\u00e9".encode()))
    assert texts(path) == ["one\r\ntwo \x00 caf\u00e9"]


def test_a_separator_cuts_a_text_file_into_documents(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("one<|endoftext|>two\n<|endoftext|>three")
    assert texts(path, separator="<|endoftext|>") == ["one", "two\n", "three"]


def test_parquet_gives_the_column_asked_for(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "body": TEXTS}), path, row_group_size=3)
    assert texts(path, field="body") == TEXTS


def test_a_folder_is_read_to_the_bottom_in_the_order_of_names(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "c" / "code.py").write_text("code")
    (tmp_path / "b" / "rows.jsonl.gz").write_bytes(gzip.compress(ROWS))
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "z.rst").write_text("end")
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    source = open_source(tmp_path)
    assert [document.text for document in source.documents()] == ["first", "code", *TEXTS, "end"]
    assert source.ignored == {".png": 1}
    assert (
        source.consumed
        == source.size
        == sum(p.stat().st_size for p in tmp_path.rglob("*.*") if p.suffix in {".py", ".gz", ".md", ".rst"})
    )


def test_the_identity_of_files_follows_their_content_and_not_their_place(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("same")
    here, there = tmp_path / "here", tmp_path / "there"
    assert open_source(here).identity() == open_source(there).identity()
    (there / "a.txt").write_text("some")
    assert open_source(here).identity() != open_source(there).identity()


@pytest.mark.parametrize("errors, expected", [("strict", None), ("replace", "good \ufffd bad")])
def test_bytes_that_are_not_utf8_name_file_and_offset_or_are_replaced(tmp_path, errors, expected):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"\xef\xbb\xbfgood \xe9 bad")
    if expected is None:
        with pytest.raises(ValueError, match=r"latin\.txt: byte 0xe9 at offset 8 is not UTF-8; .*--errors replace"):
            texts(path)
    else:
        assert texts(path, errors=errors) == [expected]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_byte_order_mark_is_no_text_of_json_lines(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACKED[suffix](b"\xef\xbb\xbf" + ROWS))
    assert texts(path) == TEXTS
    path.write_bytes(PACKED[suffix](b'\xef\xbb\xbf{"text": "\xff"}\n'))
    with pytest.raises(ValueError, match="line 1: byte 0xff at offset 13"):
        texts(path)


def test_bytes_that_are_not_utf8_in_json_lines_name_the_line_and_offset(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2: byte 0xff at offset 24"):
        texts(path)
    assert texts(path, errors="replace") == ["a", "\ufffd"]


def test_utf16_is_recognised(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("wide", encoding="utf-16")
    with pytest.raises(ValueError, match="UTF-16"):
        texts(path)


def test_half_a_surrogate_pair_in_json_is_an_error_or_replaced(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"text": "a\ud83d\ude00b\ud83dc"}')
    with pytest.raises(ValueError, match=r"line 1: character 3 is half a surrogate pair"):
        texts(path)
    assert texts(path, errors="replace") == ["a\U0001f600b\ufffdc"]


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"body": "x", "id": 3}', r"line 2: no field 'text'; fields seen: body, id"),
        ('{"text": null, "id": 3}', r"line 2: the field 'text' holds NoneType, not text; fields seen: text, id"),
        ('{"text": 5}', r"line 2: the field 'text' holds int"),
        ('["text"]', r"line 2: a row must be an object .* found list"),
        ('{"text": "cut', r"line 2 is not JSON"),
    ],
)
def test_a_row_that_has_no_text_names_its_line_and_fields(tmp_path, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "good"}\n' + row + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl {message}"):
        texts(path)


def test_parquet_without_the_column_names_those_it_has(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": [1], "body": [None]}), path)
    with pytest.raises(
        ValueError, match=r"rows\.parquet: it has no column 'text'; columns: \['id', 'body'\]; choose one with --field"
    ):
        texts(path)
    with pytest.raises(ValueError, match=r"^\S+rows\.parquet row 1: the field 'id' holds int, not text; fields seen: id$"):
        texts(path, field="id")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"rows\.parquet"):
        texts(path)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-7], lambda data: data[:30] + b"\xff\xff\xff\xff" + data[34:], lambda _: b"plain"]
)
def test_packed_data_cut_short_or_damaged_is_an_error(tmp_path, suffix, damage):
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(damage(PACKED[suffix](ROWS * 50)))
    with pytest.raises(ValueError, match=r"rows\.jsonl\S+ (is damaged or cut short|line)"):
        texts(path)


def test_a_missing_source_names_what_can_be_given(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no source .*none\.txt: no such file.*hub name, or pydoc"):
        open_source(tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_source("some/data.jsonl.gz")


def test_an_empty_source_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"holds nothing to read.*no files"):
        open_source(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"holds nothing to read.*\.bin"):
        open_source(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match=r"empty\.txt is empty: 0 bytes"):
        open_source(empty)


def test_an_option_that_does_not_apply_is_an_error(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(ROWS)
    with pytest.raises(ValueError, match="hub_config='en' is for data sets on the hub"):
        open_source(rows, hub_config="en")
    for spec in (rows, "pydoc", "owner/name"):
        with pytest.raises(ValueError, match="is for text files"):
            open_source(spec, separator="---")
    with pytest.raises(ValueError, match="separator is empty"):
        open_source(rows, separator="")
    with pytest.raises(ValueError, match="errors is 'ignore'; it must be strict or replace"):
        open_source(rows, errors="ignore")
