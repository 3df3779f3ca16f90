"""A package's names that are imported on their first use."""

import sys

import pytest

from raoe_train.artifacts.lazy import exports


def test_names_are_imported_when_asked_for(tmp_path, monkeypatch):
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cellar.py").write_text("wine = 1\nsecret = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    find = exports("house", {"cellar": ["wine"]})
    assert "house.cellar" not in sys.modules
    assert find("wine") == 1
    with pytest.raises(AttributeError, match="module 'house' has no attribute 'secret'"):
        find("secret")
