"""A report as one HTML page: the same content, nothing from outside, nothing that runs."""

import base64
from html.parser import HTMLParser

import pytest

from proteus_lm.report.html import to_html

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")


class Seen(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_headings_tables_lists_code_and_bold_are_markup(tmp_path):
    page = to_html(
        "# A\n\nb **c** `d*e*`\n\n| x | y |\n| --- | --- |\n| 1 | p\\|q |\n\n- one\n- two\n\n```text\nraw  | x\n```\n", tmp_path
    )
    seen = Seen(page)
    assert {"h1", "p", "strong", "code", "table", "th", "td", "ul", "li", "pre"} <= set(seen.tags)
    assert seen.tags.count("td") == 2
    text = "".join(seen.text)
    assert "p|q" in text
    assert "raw  | x" in text
    assert "d*e*" in text


@pytest.mark.parametrize("bad", ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '" onload="x', "&amp;<b>"])
def test_text_from_models_and_names_cannot_become_markup(bad, tmp_path):
    page = to_html(
        f"# {bad}\n\n{bad}\n\n| {bad} |\n| --- |\n| {bad} |\n\n- {bad} **{bad}** `{bad}`\n\n```text\n{bad}\n```\n", tmp_path
    )
    seen = Seen(page)
    assert not {"script", "img", "b"} & set(seen.tags)
    assert "".join(seen.text).count(bad) == 9  # the title too


def test_pictures_are_inside_the_page_and_nothing_comes_from_outside(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    seen = Seen(to_html("![A picture](a.png)\n", tmp_path))
    assert seen.sources == ["data:image/png;base64," + base64.b64encode(PNG).decode()]
    with pytest.raises(FileNotFoundError, match=r"b\.png"):
        to_html("![B](b.png)\n", tmp_path)


def test_a_fence_inside_a_longer_fence_does_not_end_it(tmp_path):
    seen = Seen(to_html("````text\n```\n# no heading\n````\n\nafter\n", tmp_path))
    assert "h1" not in seen.tags
    assert seen.tags.count("pre") == 1
