"""Escaping of names in Markdown pages."""

from raoe_train.artifacts.report import cell


def test_names_are_escaped_in_markdown():
    names = ["# h", "- item", "> q", "---", "+ plus", "1. one", "2) two", "-0.5", "1.5", "a # b", "dev.tsv"]
    shown = [r"\# h", r"\- item", r"\> q", r"\---", r"\+ plus", r"1\. one", r"2\) two", *names[7:]]
    assert [cell(name) for name in names] == shown
