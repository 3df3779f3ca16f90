"""Triplets of the recipe `bellm`, which tests/encoders/test_bidirectional_saving.py trains."""

from __future__ import annotations

import pytest

from raoe_train.cli import load
from tests.tiny import SENTENCES, training_data


def nli_file(path, premises=12):
    lines = ["premise\thypothesis\tlabel"]
    for n in range(premises):
        for label, word in enumerate(("surely", "maybe", "never")):
            lines.append(f"{SENTENCES[n % len(SENTENCES)]} {n}\t{word} {SENTENCES[(n + 1) % len(SENTENCES)]}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_triplets_of_a_pair_file(tmp_path, capsys):
    source = nli_file(tmp_path / "nli.tsv")
    config = load("train", "bellm", {"data.train": [source]})
    datasets, texts = training_data(config)
    assert datasets["nli"].column_names == ["anchor", "positive", "negative"] and len(datasets["nli"]) == 12
    assert datasets["nli"][0]["positive"].startswith("surely") and datasets["nli"][0]["negative"].startswith("never")
    assert len(list(texts)) == 36
    assert ": 12 rows, 12 rows dropped (neutral)" in capsys.readouterr().out
    datasets, _ = training_data(load("train", "bellm", {"data.train": [source], "data.neutral": True}))
    assert datasets["nli"].column_names == ["anchor", "positive", "negative", "neutral"]
    (tmp_path / "none.tsv").write_text("premise\thypothesis\tlabel\na b\tc\t0\n")
    with pytest.raises(ValueError, match="contradict"):
        training_data(load("train", "bellm", {"data.train": [str(tmp_path / "none.tsv")]}))
