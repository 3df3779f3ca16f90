"""Code in README.md and docs is run, or parsed if it needs more than CI has."""

from __future__ import annotations

import importlib.util
import re

import pytest

from raoe_train.cli import configure
from raoe_train.config import checked, shipped
from tests.pages import FENCE, NUMBER, PAGES, READ, ROOT, RUN, alike, blocks, commands, outputs, runs

NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if page != "README.md"])  # packaging runs README.md from a wheel
def test_page_runs(tmp_path, page):
    ours = runs(page, TEXT[page])
    for block, got in zip(ours, outputs(page, tmp_path, ours), strict=True):
        if block.kept is not None and block.compared:
            assert alike(block.kept, got, block.within), f"`make tutorials` writes outputs anew:\n{block.code}\n{got}"


@pytest.mark.parametrize("page", NAMES)
def test_every_code_block_is_run_or_parsed(page):
    languages = {block.language for block in blocks(TEXT[page])}
    assert languages <= {"python", "sh", "text", "json", "yaml", "math"}
    assert "python" not in languages or page in RUN or page in READ
    if page not in RUN:
        for block in blocks(TEXT[page]):
            assert block.language != "python" or compile(block.code, page, "exec")
    indented = re.findall(r"(?:^ {4}.*\n)+", FENCE.sub("", TEXT[page]), re.MULTILINE)
    assert not [code for code in indented if re.match(r" {4}(import|from) ", code)], "python is fenced as such"
    if not page.startswith("raoe_kernels") and not page.endswith("report.md"):
        typed = [block.code for block in blocks(TEXT[page]) if block.language in ("python", "sh")]
        lines = [line for code in (*typed, *indented) for line in code.splitlines()]
        assert not [line for line in lines if len(line.removeprefix("    ")) > 88], "the site cuts longer lines off"
    ran = [block.code for block in runs(page, TEXT[page]) if block.language == "sh"] if page in RUN else []
    assert page in READ or len(commands(TEXT[page])) <= sum(code.count("\n") for code in ran)
    assert page in READ or "sh" not in languages or ran


def test_lists_of_pages_are_up_to_date():
    assert not [page for page in READ if page not in TEXT or not (commands(TEXT[page]) or "```python" in TEXT[page])]
    assert not [page for page in RUN if page not in TEXT]


@pytest.mark.parametrize("page", READ)
def test_commands_are_valid(page):
    """Jobs, recipes, keys and values exist, except the reader's own: files, and names in capitals."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(TEXT[page]):
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[0] == "make":
            assert words[1] in targets, words
            continue
        if "-m" in words and words[0] != "raoe-train":
            module = words[words.index("-m") + 1]
            assert importlib.util.find_spec(module), words
            if module != "raoe_train":
                continue
            words = ["raoe-train", *words[words.index("-m") + 2 :]]
        if words[0] == "raoe-train":
            _, job, *rest = words
            count = next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))
            recipe, rest = rest[:count], rest[count:]
            if recipe and job != "prepare":
                assert recipe[0] in shipped() or recipe[0].isupper() or recipe[0].endswith(".yaml"), words
                recipe = recipe if recipe[0] in shipped() else []
            if "--config" in rest:  # of a file of the reader's
                place = rest.index("--config")
                del rest[place : place + 2]
            known = [word for word in rest if word not in ("--traceback", "--help") and not word.startswith("--print_")]
            options: list[list[str]] = []  # a key and its values
            for word in known:
                if word.startswith("--"):
                    options.append([])
                options[-1].append(word)
            output = (word for option in options if not option[-1].isupper() for word in option)
            assert checked(configure([job, *recipe, *output])[2]), words


def test_outputs_are_compared():
    page = "```python\nprint(1)\n```\n\n<!-- numbers within 2 -->\n```text\nscore 81.5 of 3\n```\n"
    page += "more\n```text\nno output\n```\n"
    first, second = blocks(page)
    assert (first.language, first.kept, first.within, second.language) == ("python", "score 81.5 of 3\n", 2.0, "text")
    assert page[slice(*first.where)] == first.kept and first.compared
    assert not blocks(page.replace("numbers within 2", "not compared"))[0].compared
    assert alike(first.kept, "score  80.1 of 3", 2) and not alike(first.kept, "score 79.4 of 3", 2)
    assert alike(first.kept, "score 1 of 1", None) and not alike(first.kept, "scores 81.5 of 3", None)
    assert not alike(first.kept, "score 81.5 of", 2) and NUMBER.findall("-1,024.5 1e-3") == ["-1,024.5", "1e-3"]
