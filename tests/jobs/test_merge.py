"""The job `merge`: weights between two encoders, and which of them is kept."""

from __future__ import annotations

import json

import pytest
import torch

from raoe_train import load_encoder, run
from raoe_train.encoders.interpolation import interpolate, weights_of
from tests.tiny import SENTENCES, tiny_encoder


def moved(encoder, by: float):
    """The encoder, with all its weights moved by up to so much."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight += by * torch.randn_like(weight)
    return encoder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with an encoder, start, the same far from there, end, and pairs whose scores are start's cosines."""
    folder = tmp_path_factory.mktemp("two")
    encoder = tiny_encoder(double=False)
    encoder.save_pretrained(str(folder / "start"))
    pairs = [(first, second) for first in SENTENCES[:6] for second in SENTENCES[6:]]
    made = dict(zip(SENTENCES, encoder.eval().encode(SENTENCES, normalize_embeddings=True), strict=True))
    rows = [f"{first}\t{second}\t{made[first] @ made[second]}" for first, second in pairs]
    (folder / "like_start.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    moved(encoder, 1).save_pretrained(str(folder / "end"))
    return folder


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("weight", [0, 0.25, 1])
def test_weights_are_between(weight, double):
    encoder = tiny_encoder(double=double)
    start = weights_of(encoder)
    end = weights_of(moved(encoder, 0.1))
    interpolate(encoder, start, end, weight)
    limit = 1e-15 if double else 1e-7
    for name, value in encoder.state_dict().items():
        wanted = (1 - weight) * start[name].double() + weight * end[name].double()
        if weight == 0.25:
            torch.testing.assert_close(value.double(), wanted, rtol=limit, atol=limit)
        else:
            assert value.equal(wanted.to(value.dtype)), name


def test_the_start_is_a_copy():
    encoder = tiny_encoder()
    start = weights_of(encoder)
    before = {name: value.clone() for name, value in start.items()}
    moved(encoder, 1)
    assert all(value.equal(before[name]) for name, value in start.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda end: end.pop("w"), "one alone has w"),
        (lambda end: end.update(v=torch.ones(1)), "one alone has v"),
        (lambda end: end.update(w=torch.ones(3)), r"w is of the shapes \(2,\) and \(3,\)"),
        (lambda end: end.update(ids=torch.tensor([1, 3])), "ids differs, which is no weight"),
    ],
)
def test_encoders_of_another_kind(change, said):
    start = {"w": torch.ones(2), "ids": torch.tensor([1, 2])}
    end = {name: value.clone() for name, value in start.items()}
    change(end)
    with pytest.raises(ValueError, match=said):
        interpolate(None, start, end, 0.5)


def test_the_weight_best_on_dev_is_saved(two, tmp_path, capsys):
    asked = {"model.name": str(two / "end"), "start": str(two / "start"), "data.dev": str(two / "like_start.tsv")}
    result = run(
        "merge", **asked, weights=[1, 0.01, 0.6], tasks=[str(two / "like_start.tsv")], output=str(tmp_path / "out")
    )
    scores = [row["dev"] for row in result["curve"]]
    assert result["weight"] == 0.01 and scores[1] > 80 > max(scores[0], scores[2])
    assert [row["average"] for row in result["curve"]] == pytest.approx(scores)
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["curve"] == result["curve"]
    *_, second, _, saved = capsys.readouterr().out.splitlines()
    assert second.startswith("weight 0.01   dev 8") and saved == f"weight 0.01 saved to {tmp_path / 'out'}"
    start, end, made = (weights_of(load_encoder(str(path))) for path in (two / "start", two / "end", tmp_path / "out"))
    for name, value in made.items():
        torch.testing.assert_close(value, start[name].lerp(end[name], 0.01), rtol=1e-6, atol=1e-7)


def test_one_weight_needs_no_dev(two, tmp_path):
    result = run("merge", **{"model.name": str(two / "end")}, start=str(two / "start"), output=str(tmp_path / "out"))
    assert result["weight"] == 0.5 and result["curve"] == [{"weight": 0.5}]
    assert load_encoder(str(tmp_path / "out")).encode(SENTENCES).shape == (len(SENTENCES), 16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"start": None}, "--start is missing"),
        ({"weights": []}, "weights is empty: say numbers from 0"),
        ({"weights": [0.5, 1.5]}, r"weights must be at most 1, got 1\.5"),
        ({"weights": [float("nan")]}, "weights must be at least 0, got nan"),
        ({"weights": [0, 1]}, "--data.dev is missing"),
        ({"output": "end"}, "end is not empty"),
        ({"start": "other"}, "is of the shapes"),
    ],
)
def test_what_cannot_be_merged(two, tmp_path, changes, said):
    if changes.get("start") == "other":
        other = tiny_encoder(double=False)
        other[0].auto_model.resize_token_embeddings(121)
        other.save_pretrained(str(tmp_path / "other"))
        changes = {"start": str(tmp_path / "other")}
    elif "output" in changes:
        changes = {"output": str(two / "end")}
    asked = {"model.name": str(two / "end"), "start": str(two / "start"), "output": str(tmp_path / "out"), **changes}
    with pytest.raises(ValueError, match=said):
        run("merge", **asked)
    assert not (tmp_path / "out").exists()
