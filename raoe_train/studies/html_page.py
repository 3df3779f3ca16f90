"""A report as one HTML file that needs no other: tables that sort and filter, pictures inside, light and dark.

It is made of the lines of the Markdown page, so both say the same. Of Markdown it knows what our pages use; all else
is text, and only a script with our own sum may run in it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

INLINE = re.compile(
    r"\\(?P<escaped>[\\`*\[\]|~_])|(?P<kept>&(?:amp|lt);|</?u>)|(?P<nothing><!-- -->)|(?P<code>`[^`]+`)|(?P<mark>\*\*?)"
)
PICTURE = re.compile(r"!\[(.*)\]\(([^()/]+)\)")
PIPE = re.compile(r"(?<!\\)\|")
MARKS = {"**": "strong", "*": "em"}
STYLE = """
:root { color-scheme: light dark; --line: light-dark(#ddd, #444); --faint: light-dark(#f4f4f4, #2a2a2a) }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
  background: light-dark(#fff, #1b1b1b); color: light-dark(#222, #ddd) }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal } tbody tr:hover { background: var(--faint) }
th button { all: unset; cursor: pointer; font-weight: 600 } th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " \\2191" }
th[aria-sort=descending] button::after { content: " \\2193" }
img { max-width: 100%; background: #fff } input { font: inherit; padding: .3rem .6rem; width: min(24rem, 90%) }
"""
SCRIPT = """
const number = text => /^[-+]?[0-9]/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN;
for (const head of document.querySelectorAll("th")) head.firstElementChild.onclick = () => {
  const body = head.closest("table").tBodies[0], rows = [...body.rows], at = head.cellIndex, was = head.ariaSort;
  const text = row => row.cells[at].textContent.trim();
  // the highest number first, or the first word
  const down = was ? was === "ascending" : rows.some(row => !isNaN(number(text(row))));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const order = (a, b) => {
    const x = number(text(a)), y = number(text(b));
    if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y) || (down ? -1 : 1) * text(a).localeCompare(text(b));
    return down ? y - x : x - y;
  };
  body.append(...rows.sort(order));
};
const filter = document.querySelector("input"), shown = document.querySelector("output");
filter.oninput = () => {
  const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean), rows = document.querySelectorAll("tbody tr");
  for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
  shown.textContent = words.length ? [...rows].filter(row => !row.hidden).length + " of " + rows.length + " rows" : "";
};
"""


def html_page(lines: Sequence[str], folder: Path) -> str:
    """The page of these lines of Markdown, whose pictures lie in `folder`."""
    text = [line for block in lines for line in block.split("\n")]
    title = next((inline(line.lstrip("# ")) for line in text if line.startswith("# ")), "Report")
    allowed = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{re.sub('<[^>]*>', '', title)}</title>\n<style>{STYLE}</style>",
            '<p><input type="search" placeholder="only rows with these words" aria-label="filter rows">',
            "<output></output></p>",
            *_blocks(text, folder),
            f"<script>{SCRIPT}</script>\n</html>\n",
        ]
    )


def inline(text: str) -> str:
    """A line of Markdown, made with `cell`, as HTML."""
    made, open_, end = [], [], 0  # type: list[str], list[str], int
    for found in INLINE.finditer(text):
        made.append(html.escape(text[end : found.start()]))
        end = found.end()
        if found["escaped"]:
            made.append(html.escape(found["escaped"]))
        elif found["code"]:
            made.append(f"<code>{html.escape(found['code'].strip('`'))}</code>")
        elif found["kept"]:
            made.append(found["kept"])
        elif found["mark"]:
            tag = MARKS[found["mark"]]
            made.append(f"</{open_.pop()}>" if tag in open_ else f"<{tag}>")
            open_ += [tag] if made[-1] == f"<{tag}>" else []
    return "".join([*made, html.escape(text[end:])])


def _blocks(lines: Sequence[str], folder: Path) -> Iterator[str]:
    def kind(line: str) -> str:
        return next((mark for mark in ("|", "- ", "#") if line.startswith(mark)), "" if line.strip() else "nothing")

    for what, some in groupby(lines, kind):
        found = list(some)
        if what == "|":
            yield from _table([[each.strip() for each in PIPE.split(line)[1:-1]] for line in found])
        elif what == "- ":
            yield "<ul>" + "".join(f"<li>{inline(line[2:])}</li>" for line in found) + "</ul>"
        elif what == "#":
            for line in found:
                level = len(line) - len(line.lstrip("#"))
                yield f"<h{level}>{inline(line[level:].strip())}</h{level}>"
        elif what == "":
            yield from (_picture(line, folder) or f"<p>{inline(line)}</p>" for line in found)


def _table(rows: list[list[str]]) -> Iterator[str]:
    head, _, *body = rows
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f'<th scope="col"><button type="button">{inline(text)}</button></th>' for text in head)
    yield "</tr></thead><tbody>"
    yield from ("<tr>" + "".join(f"<td>{inline(text)}</td>" for text in row) + "</tr>" for row in body)
    yield "</tbody></table></div>"


def _picture(line: str, folder: Path) -> str | None:
    found = PICTURE.fullmatch(line)
    if found is None or not (folder / found[2]).is_file():
        return None
    data = base64.b64encode((folder / found[2]).read_bytes()).decode()
    return f'<img alt="{html.escape(found[1])}" src="data:image/png;base64,{data}">'
