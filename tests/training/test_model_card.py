"""The card beside a trained encoder: recipe, data, scores, picture; what comes from files is text in it."""

import re
from pathlib import Path

import pytest

from raoe_train import run
from tests.training.small_runs import settings

EVIL = "</code><script>alert(1)</script> a | b **bold** [x](http://y.z) `c`"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    options = settings(folder, **{"evaluation.tasks": [str(folder / "dev.tsv")]})
    source = Path(options["data.train"][0]).rename(folder / "tr*ain* <b>.tsv")
    head, *lines = source.read_text().splitlines()
    source.write_text("\n".join([head, *(EVIL + line for line in lines)]) + "\n")
    options["data.train"] = [str(source)]
    return folder, source, run("train", "raoe-s1", **options)


def test_model_card_describes_the_run(trained):
    folder, _, metrics = trained
    card = (folder / "out" / "README.md").read_text()
    ours = card.partition("## Recipe and scores")[2].partition("## Model Details")[0]
    assert ours and "## Usage" in card and "### Training Logs" in card  # theirs is around it
    assert "      logging_steps: 2.0\n" in ours and "teacher:" not in ours
    assert "class_path: RAOELoss\n" in ours
    assert "weight_decay" not in ours  # a default
    for task, name in ((None, "dev"), (str(folder / "dev.tsv"), str(folder / "dev.tsv"))):
        scores = metrics if task is None else {when: metrics[when]["tasks"][task] for when in ("before", "after")}
        before, after = (scores[when]["spearman"] for when in ("before", "after"))
        assert f"    {name} {before:.2f} {after:.2f} {after - before:+.2f}" in re.sub(r"(?<=\S) +", " ", ours)
    assert "![run](run.png)" in ours and (folder / "out" / "run.png").is_file()
    assert f"torch {metrics['versions']['torch']}" in ours


def test_text_from_files_is_escaped(trained):
    folder, _, _ = trained
    card = (folder / "out" / "README.md").read_text()
    details = card.partition("## Training Details")[2]
    assert "alert(1)" in details and "\\*\\*bold\\*\\*" in details
    for page in (details, card.partition("## Recipe and scores")[2]):
        text = "\n".join(line for line in page.splitlines() if not line.startswith("    "))  # code is not interpreted
        assert not [mark for mark in ("<script", "**bold**", "](http://y.z", "tr*ain", " <b>") if mark in text]
    rows = [line for line in details.splitlines() if "alert(1)" in line]
    assert rows and all(line.count("|") == 5 for line in rows)  # three columns and none more
