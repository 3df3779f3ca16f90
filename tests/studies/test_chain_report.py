"""The report of chains: hand-computed measures and the page."""

import itertools
import json
import re

import numpy as np
import pytest
from sentence_transformers import util

from benchmarks.studies.__main__ import main
from benchmarks.studies.drift import drift
from tests.tiny import SENTENCES, tiny_encoder


def at(*degrees):
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def cos(degrees):
    return np.cos(np.radians(degrees))


def test_drift_by_hand():
    result = drift([at(0, 10, 20, 15, 40), at(0, 30, 30, 25)], length=6)
    # 10, 20 descends, 20, 15 does not, 15, 40 does; 30, 30 is repeated; 30, 25 does not
    assert (result["chains"], result["neighbours"], result["repeated"], result["descending"]) == (2, 5, 0.2, 0.5)
    # Of two chains drawn from two: the first twice (2 of 3), the second twice (0 of 1) or each once (2 of 4).
    assert result["interval"] == [0, pytest.approx(2 / 3)]
    np.testing.assert_allclose(
        result["to_source"],
        [1, (cos(10) + cos(30)) / 2, (cos(20) + cos(30)) / 2, (cos(15) + cos(25)) / 2, cos(40), np.nan],
    )
    assert result["similarity"][2][1] == pytest.approx((cos(10) + 1) / 2)
    assert result["similarity"][4][2] == pytest.approx(cos(20)) and np.isnan(result["similarity"][5]).all()
    two_apart = [cos(20), cos(5), cos(20), cos(30), cos(5)]
    assert result["by_distance"][2] == pytest.approx(np.mean(two_apart))
    assert result["by_distance"][4] == pytest.approx(cos(40)) and np.isnan(result["by_distance"][5])


@pytest.fixture
def files(tmp_path):
    """Chains of two methods from the same sources, in another order."""

    def write(name, method, chains):
        path = tmp_path / name
        rows = [{"id": key, "sentences": sentences, "method": method} for key, sentences in chains]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    s = SENTENCES
    first = write("guided.jsonl", "guided", [(1, [s[0], s[1], "a | b", s[3], s[4]]), (2, s[5:10])])
    second = write("iterative.jsonl", "iterative", [(2, [s[5], s[2], s[7], s[1]]), (1, [s[0], s[9], s[9], s[10]])])
    (tmp_path / "iterative.jsonl.json").write_text(json.dumps({"failed_chains": {"repeated": 3, "empty": 1}}))
    return first, second, write


def test_the_page_and_its_numbers(files, encoder, tmp_path, capsys):
    first, second, _ = files
    words = ["report", str(first), str(second), "--model.name", encoder, "--output", str(tmp_path / "page")]
    assert main([*words, "--length", "4"]) == 0
    assert "| guided | 2 | - |" in capsys.readouterr().out
    result = json.loads((tmp_path / "page" / "report.json").read_text())
    assert list(result["chains"]) == ["guided", "iterative"] and result["sources"] == 2
    assert result["given_up"] == {"iterative": {"repeated": 3, "empty": 1}}

    model = tiny_encoder(double=False).eval()

    def cosines(*texts):
        return util.cos_sim(*(model.encode([text], convert_to_tensor=True) for text in texts)).item()

    s = SENTENCES
    mine = [cosines(s[0], text) for text in (s[1], "a | b", s[3])], [cosines(s[5], text) for text in s[6:9]]
    falls = [a > b for chain in mine for a, b in itertools.pairwise(chain)]
    assert result["chains"]["guided"]["descending"] == np.mean(falls)
    np.testing.assert_allclose(result["chains"]["guided"]["to_source"], [1, *np.mean(mine, axis=0)], atol=1e-5)
    assert result["unrelated"] == pytest.approx(cosines(s[0], s[5]), abs=1e-5)

    page = (tmp_path / "page" / "report.md").read_text()
    assert "| iterative | 2 | 4 |" in page and "| guided | 2 | - |" in page
    assert "Given up, iterative: 3 repeated, 1 empty" in page and "a \\| b" in page
    # the case study shows what does not descend: of the repeated sentence the second
    row = next(line for line in page.splitlines() if line.startswith("| 2 | a "))
    assert row.endswith(f"**{s[9]} [{cosines(s[0], s[9]):.4f}]** |")
    assert row.count("**") == 2 + 2 * (mine[0][1] >= mine[0][0])
    assert f"## {s[5]}" in page and s[4] not in page  # beyond the length
    assert (tmp_path / "page" / "similarity.png").read_bytes().startswith(b"\x89PNG")
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)
