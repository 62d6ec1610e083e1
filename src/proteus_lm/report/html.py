"""A report's Markdown as one HTML file that stands alone: text escaped, pictures inside. Only the Markdown that reports use."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; vertical-align: top; }
th { background: #f3f3f3; } code, pre { background: #f6f6f6; } pre { padding: .6rem; overflow-x: auto; white-space: pre-wrap; }
img { max-width: 100%; } h1, h2 { line-height: 1.2; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_html(markdown: str, folder: Path) -> str:
    """A whole page from Markdown: headings, paragraphs, lists with `-`, tables, fenced code, pictures, `code` and **bold**.

    Everything else is text and escaped, so nothing in a sample or a name becomes markup; no script can run.

    Args:
        folder: where the pictures lie; each is put into the page.

    Raises:
        FileNotFoundError: for a picture that is not there.
    """
    blocks = list(_blocks(markdown.split("\n"), folder))
    title = next((re.sub("<[^>]*>", "", block) for block in blocks if block.startswith("<h1>")), "Report")
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{title}</title>'
    body = "\n".join(blocks)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n'


def _blocks(lines: Sequence[str], folder: Path) -> Iterator[str]:
    i = 0
    while i < len(lines):
        line = lines[i]
        fence = re.match(r"(`{3,})\w*$", line)
        heading = re.match(r"(#{1,6}) (.*)", line)
        picture = re.fullmatch(r"!\[(.*)\]\(([^)]+)\)", line)
        if fence:
            end = next((j for j in range(i + 1, len(lines)) if lines[j] == fence[1]), len(lines))
            yield f"<pre>{html.escape(chr(10).join(lines[i + 1 : end]))}</pre>"
            i = end + 1
        elif heading:
            yield f"<h{len(heading[1])}>{_inline(heading[2])}</h{len(heading[1])}>"
            i += 1
        elif picture:
            data = base64.b64encode((folder / picture[2]).read_bytes()).decode()
            yield f'<figure><img alt="{html.escape(picture[1])}" src="data:image/png;base64,{data}"></figure>'
            i += 1
        elif line.startswith("| "):
            end = _run(lines, i, "| ")
            yield _table(lines[i:end])
            i = end
        elif line.startswith("- "):
            end = _run(lines, i, "- ")
            items = "".join(f"<li>{_inline(item[2:])}</li>" for item in lines[i:end])
            yield f"<ul>{items}</ul>"
            i = end
        elif line.strip():
            end = next((j for j in range(i, len(lines)) if not lines[j].strip()), len(lines))
            yield f"<p>{_inline(' '.join(lines[i:end]))}</p>"
            i = end
        else:
            i += 1


def _run(lines: Sequence[str], start: int, prefix: str) -> int:
    """The line behind the last of those in a row that begin with `prefix`."""
    return next((j for j in range(start, len(lines)) if not lines[j].startswith(prefix)), len(lines))


def _table(lines: Sequence[str]) -> str:
    rows = [[_inline(c.strip().replace("\\|", "|")) for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    head = "".join(f"<th>{cell}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _inline(text: str) -> str:
    """Escaped text with `code` and **bold**; nothing inside code is looked at."""
    parts = re.split(r"(`[^`]+`)", text)
    found = []
    for part in parts:
        if len(part) > 2 and part[0] == part[-1] == "`":
            found.append(f"<code>{html.escape(part[1:-1])}</code>")
        else:
            found.append(re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(part)))
    return "".join(found)
