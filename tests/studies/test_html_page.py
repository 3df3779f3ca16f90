"""The report as one HTML file: what the Markdown page says, and nothing that comes from outside it is a tag."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

from raoe_train.artifacts.markdown import cell, table
from raoe_train.cli import run
from raoe_train.studies.html_page import html_page, inline
from tests.studies.test_score_report import result, sts

EVIL = (
    "<script>x</script>|[a](http://evil)![b](//evil) **b** `c` <!-- --> <img src=x onerror=y> \\ a\\|b _i_ &lt;u> <u>"
)


class Read(HTMLParser):
    """Tags with their attributes, and the texts of cells by row."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.rows, self.open = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag):
        self.open = self.open and tag not in ("td", "th")

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1] += data


def test_what_is_in_a_cell_is_read_as_it_was(tmp_path):
    read = Read(html_page(["# A *title*", *table([cell(EVIL), "two"], [["**" + cell(EVIL) + "**", "1.00"]])], tmp_path))
    text = " ".join(EVIL.split())
    assert read.rows == [[text, "two"], [text, "1.00"]]
    assert {tag for tag, _ in read.tags} <= {
        "html", "meta", "title", "style", "p", "input", "output", "h1", "div", "table", "thead", "tbody", "tr", "th",
        "td", "button", "strong", "em", "script",
    }  # fmt: skip
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert inline("**a** <u>b</u> *c* & `d`") == "<strong>a</strong> <u>b</u> <em>c</em> &amp; <code>d</code>"


def test_one_file_with_all_that_it_shows(tmp_path):
    tasks = {"stsb": sts(80.0), "sick": sts(75.5, 4927), EVIL: sts(1.0, 3)}
    files = [result(tmp_path, "one", tasks), result(tmp_path, EVIL.replace("/", ""), tasks)]
    run("report", results=files, output=str(tmp_path / "page"))
    page, beside = ((tmp_path / "page" / f"report.{kind}").read_text() for kind in ("html", "md"))
    read = Read(page)
    pictures = [of["src"] for tag, of in read.tags if tag == "img"]
    assert pictures and all(src.startswith("data:image/png;base64,iVBOR") for src in pictures)
    assert not [of for tag, of in read.tags if {"href", "onerror", "onclick"} & {*of} or tag in ("a", "link", "iframe")]
    (policy,) = [of["content"] for tag, of in read.tags if "content-security" in of.get("http-equiv", "").lower()]
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "prefers-color-scheme" in page or "light-dark(" in page
    assert len(read.rows) == len([line for line in beside.splitlines() if re.match(r"\| ", line)])
    assert read.rows[1][1:3] == ["80.00", "75.50"]
