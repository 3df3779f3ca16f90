"""The report of scores: intervals, the page, invalid input."""

import json
import re

import numpy as np
from scipy import stats

from benchmarks.studies.__main__ import main
from raoe_train.evaluation.tasks import Outcomes
from raoe_train.training.certificate import differences, interval, resample, spearman


def test_bootstrap_by_hand():
    first, second = Outcomes(np.array([0.0, 100.0])), Outcomes(np.array([100.0, 100.0]))
    sample = differences(first, second, 4000, seed=1)
    # of two draws of two: the first example twice, once, never
    values, counts = np.unique(sample, return_counts=True)
    assert values.tolist() == [0, 50, 100]
    np.testing.assert_allclose(counts / 4000, [0.25, 0.5, 0.25], atol=0.03)
    assert interval(sample) == (0, 100)
    np.testing.assert_array_equal(differences(second, first, 50, seed=1), -sample[:50])
    assert not np.array_equal(differences(first, second, 50, seed=2), sample[:50])


def correlated(noise, seed, gold):
    return Outcomes(gold + np.random.default_rng(seed).normal(scale=noise, size=len(gold)), gold)


def test_correlations_by_a_loop():
    gold = np.round(np.random.default_rng(0).uniform(0, 5, 60), 0)
    first, second = correlated(2, 1, gold), correlated(0.5, 2, gold)
    rng, theirs = np.random.default_rng(7), []
    for _ in range(1500):
        sample = rng.integers(60, size=60)
        a, b = (100 * stats.spearmanr(of.values[sample], gold[sample]).statistic for of in (first, second))
        theirs.append(b - a)
        np.testing.assert_allclose(spearman(first.values[sample][None], gold[sample][None]), a)
    ours = interval(differences(first, second, 1500, seed=3))
    np.testing.assert_allclose(ours, interval(np.array(theirs)), atol=3)
    assert ours[0] > 10


def test_a_single_observation():
    np.testing.assert_array_equal(resample([np.array([3.0])], lambda of, axis: of.mean(axis), 5, seed=4), [3.0] * 5)


def report(results, folder, *options):
    assert main(["report", *map(str, results), "--output", str(folder), *options]) == 0
    return json.loads((folder / "report.json").read_text())


def result(folder, name, tasks, **more):
    results = {"tasks": tasks, "average": None, "model": name, "versions": {"torch": "2.x"}, **more}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(results))
    return str(path)


def sts(spearman, pairs=1379):
    return {"kind": "sts", "main": "spearman", "spearman": spearman, "pearson": 1.0, "pairs": pairs}


def accuracy(value):
    return {"kind": "transfer", "main": "accuracy", "accuracy": value, "examples": 5}


def lines(folder):
    return (folder / "report.md").read_text().splitlines()


def test_page(tmp_path):
    names = [
        result(tmp_path, "one", {"stsb": sts(80.001), "sick": sts(None, 4927), "cr": accuracy(70.0)}),
        result(tmp_path, "two", {"stsb": sts(80.002), "sick": sts(70.0, 4927), "cr": accuracy(60.0)}),
        result(tmp_path, "three", {"stsb": sts(70.0), "sick": sts(75.0, 4927)}),
        result(tmp_path, "four", {"stsb": sts(60.0), "sick": sts(60.0, 4927)}),
    ]
    results = report(names, tmp_path / "page")
    page = lines(tmp_path / "page")
    # equal as they are shown: both the best; an average over something undefined is none
    assert "| one | **80.00** | - | - |" in page and "| two | **80.00** | <u>70.00</u> | **75.00** |" in page
    assert "| three | <u>70.00</u> | **75.00** | <u>72.50</u> |" in page and "| four | 60.00 | 60.00 | 60.00 |" in page
    assert "| one | **70.00** |" in page and "| two | <u>60.00</u> |" in page
    # of the paper's columns those that are here, and their average
    assert "| *RAOE-S1, BERT base (RAOE, Table 1)* | 87.59 | 84.00 | 85.80 |" in page
    assert not any("**" in line for line in page if line.startswith("| *")), "papers' numbers are not ranked"
    assert "- two: model two, torch 2.x" in page
    assert results["scores"]["transfer"] == {"one": {"cr": 70.0}, "two": {"cr": 60.0}}
    assert results["differences"] == {} and "## Differences" not in page
    assert (tmp_path / "page" / "scores.png").stat().st_size > 1000
    assert json.loads((tmp_path / "page" / "report.json").read_text())["scores"] == results["scores"]


def test_names_from_files_are_escaped(tmp_path):
    """No tag, link, image, address or column of a hostile result; a page is one, whoever renders it."""
    evil = "<script>x</script>|[a](http://evil)![b](//evil) *b* `c` www.evil.org"
    task = {"kind": evil, "main": evil, evil: 1.0}
    more = {"model": evil, "versions": {evil: evil}, "settings": {"tasks": [[evil, "same"]]}}
    report([result(tmp_path, name, {evil: task}, **more) for name in ("x", "y")], tmp_path)
    shown = re.sub(r"!\[scores\]\(scores\.png\)", "", (tmp_path / "report.md").read_text())
    assert "<script" not in shown and "http://" not in shown and "www." not in shown
    assert not re.search(r"(?<!\\)[\[\]`]", shown)
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {3}
    assert "&lt;script>" in shown


def test_incompatible_results(tmp_path, capsys):
    one = result(tmp_path, "one", {"stsb": sts(1.0)}, settings={"tasks": [["stsb", "a"]]})
    two = result(tmp_path, "two", {"stsb": sts(2.0)}, settings={"tasks": [["stsb", "b"]]})
    for results, message in (
        ([one, two], "'stsb' has different data"),
        ([one, one], "named twice"),
        ([one, str(tmp_path / "chains.jsonl")], "need separate reports"),
        ([str(tmp_path / "none.json")], "no such result"),
    ):
        assert main(["report", *results, "--output", str(tmp_path / "page")]) == 2
        assert message in capsys.readouterr().err
