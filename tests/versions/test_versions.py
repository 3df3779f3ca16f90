"""The corner that CI can set up fast: CI's torch with the oldest versions of all other packages."""

import pytest

from tests.versions.__main__ import main


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oldest(tmp_path):
    assert main(["--only", "py3.11-torch2.13.0-oldest", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / "py3.11-torch2.13.0-oldest.json").exists()
