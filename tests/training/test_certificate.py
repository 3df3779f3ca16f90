"""The certificate: candidates, mixtures of weights, the guard, and the start where nothing is surely better."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from sentence_transformers import SentenceTransformer

from raoe_train import evaluate_model, run
from raoe_train.cli import main
from raoe_train.config import recipe_text
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.load import load_encoder
from raoe_train.settings import Data
from raoe_train.training.certificate import RESAMPLES, add_evidence, guard_of, mix, random_phrases, weights_of, winner
from tests.forked import python
from tests.tiny import SENTENCES, load, tiny_encoder
from tests.training.small_runs import KILLED, settings, write_pairs


def pairs(path, rows, seed=0, at_random=False):
    """Pairs whose score falls with the distance of their sentences, or is random."""
    draw, count = random.Random(seed), len(SENTENCES)
    lines = ["sentence1\tsentence2\tscore"]
    for row in range(rows):
        first, second = draw.sample(range(count), 2)
        score = draw.random() if at_random else abs(first - second)
        lines.append(f"{SENTENCES[first]} {row}\t{SENTENCES[second]}\t{score}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def options(folder, seed=0, **changes):
    start = folder / "start"
    if not start.exists():
        tiny_encoder().save_pretrained(str(start))
    training = {"num_train_epochs": 4, "per_device_train_batch_size": 32, "learning_rate": 3e-2}
    given = {"model.name": str(start), "model.scratch": {}, "model.max_seq_length": None, "training": training,
             "data.train": [pairs(folder / "mine.tsv", 160, seed, bool(seed))],
             "data.dev": pairs(folder / "held.tsv", 120, seed + 1, bool(seed)),
             "loss": "PearsonLoss", "evaluation.certificate": True, "evaluation.guard_budget": 200}  # fmt: skip
    all_settings = {**settings(folder), **given, **changes}
    return {key: value for key, value in all_settings.items() if value is not None}


def weights(folder):
    return {name: value for name, value in SentenceTransformer(str(folder), device="cpu").state_dict().items()}


@pytest.mark.parametrize(
    "adapter", [{}, pytest.param({"model.lora.r": 8, "training.learning_rate": 0.03}, marks=pytest.mark.slow)]
)
def test_the_best_candidate_is_saved_with_its_certificate(tmp_path, capsys, adapter):
    metrics = run("train", None, **options(tmp_path, **adapter))
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate == metrics["certificate"] and certificate["accepted"] and metrics["failed"] == 0
    rows = certificate["candidates"]
    assert {row["share"] for row in rows.values()} == {0, 0.4, 0.5, 0.6, 0.7, 1} and len(rows) in (6, 11)
    saved = rows[certificate["saved"]]
    best = max(row["dev"] for row in rows.values() if row.get("p", 1) < 0.05)
    assert saved["change"] >= 0.9 * (best - rows["start"]["dev"])
    assert saved["dev"] == pytest.approx(metrics["after"]["spearman"], abs=1e-3)
    assert saved["change"] == pytest.approx(metrics["after"]["spearman"] - metrics["before"]["spearman"], abs=1e-3)
    assert saved["low"] < saved["change"] < saved["high"] and rows["start"]["guard"] == pytest.approx(100)
    output = capsys.readouterr().out
    assert f"{certificate['saved']} " in output and "<- saved" in output and certificate["reason"] in output
    assert "<- saved" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seed": 7}, "no candidate is significantly better than the start"),
        ({"evaluation.guard_budget": 0.0}, "every candidate lowers the guard by more than its budget of 0"),
        ({"seed": 7, "model.lora.r": 4}, "no candidate is significantly better than the start"),
    ],
    ids=["random scores", "no budget", "an adapter"],
)
def test_the_start_is_saved_if_nothing_is_better(tmp_path, capsys, changes, reason):
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "start"))  # autocast does not change float64
    given = options(tmp_path, **{"training.bf16": True, **changes})
    (tmp_path / "recipe.yaml").write_text(recipe_text(load("train", None, given)))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 1
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["saved"] == "start" and not certificate["accepted"] and reason in certificate["reason"]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["after"] == metrics["before"]  # both without autocast
    start, saved = weights(tmp_path / "start"), weights(tmp_path / "out")
    assert "model.lora.r" in changes or all(torch.equal(value, saved[name]) for name, value in start.items())
    printed = capsys.readouterr().out
    assert certificate["reason"] in printed
    # the trained encoder is not lost
    name = certificate["rejected"]
    assert f"the best rejected candidate, {name}, is saved in {tmp_path / 'out'}/rejected" in printed
    row, count = certificate["candidates"][name], certificate["missing_examples"]
    assert (count is None) == ("budget" in reason) or row["change"] <= 0
    assert count is None or f"about {count} more dev examples could make a gain of this size significant" in printed
    assert row["p"] == min(each["p"] for each in certificate["candidates"].values() if "p" in each)
    model = load_encoder(str(tmp_path / "out" / "rejected"), device="cpu")
    evaluator = evaluate_model(model, tasks=[f"sts:{given['data.dev']}"])
    (scores,) = evaluator["tasks"].values()
    assert scores["spearman"] == pytest.approx(row["dev"], abs=1e-2)


@pytest.mark.parametrize("recipe", ["adapt", None])
def test_all_rows_are_trained_on_without_a_dev_set(tmp_path, capsys, recipe):
    given = options(tmp_path, **{"data.dev": None, "data.dev_share": 0, "evaluation.certificate": "auto"})
    if recipe:
        del given["evaluation.certificate"]
        given["training"] = {"max_steps": 3, "min_steps": 0}
    metrics = run("train", recipe, **given)
    assert [*metrics["pairs"].values()] == [160] and metrics.keys().isdisjoint({"certificate", "failed"})
    assert "without a dev set, the trained encoder is saved" in capsys.readouterr().out
    start, saved = weights(tmp_path / "start"), weights(tmp_path / "out")
    assert not all(torch.equal(value, saved[name]) for name, value in start.items())
    assert not (tmp_path / "out" / "rejected").exists()


def test_dev_pairs_are_left_out_of_training(tmp_path, capsys):
    dev = pairs(tmp_path / "held.tsv", 120, 8, at_random=True)
    (tmp_path / "other.tsv").write_text("sentence1\tsentence2\tscore\n" + "".join(f"{n}\tb\t{n}\n" for n in range(64)))
    other = str(tmp_path / "other.tsv")
    with pytest.raises(ValueError, match=r"all pairs of held are also dev pairs of held\.tsv"):
        run("train", None, **options(tmp_path, seed=7, **{"data.train": [dev]}))
    metrics = run("train", None, **options(tmp_path, seed=7, **{"data.train": [f"{dev}+{other}"]}))
    assert not metrics["certificate"]["accepted"] and [*metrics["pairs"].values()] == [64]
    assert "120 of the 120 dev pairs of held.tsv are also training pairs: they are left out" in capsys.readouterr().out


def test_a_mixture_of_weights():
    encoder = tiny_encoder()
    start = weights_of(encoder)
    trained = {name: value + torch.randn_like(value) for name, value in start.items()}
    for share in (0, 0.3, 0.7, 1):
        mix(encoder, start, trained, share)
        for name, value in encoder.named_parameters():
            expected = (1 - share) * start[name].double() + share * trained[name].double()
            torch.testing.assert_close(value.double(), expected, atol=1e-6, rtol=0)
    mix(encoder, start, trained, 0)
    assert all(torch.equal(value, start[name]) for name, value in encoder.named_parameters())


def test_a_mixture_with_an_adapter_mixes_what_it_adds():
    from peft import LoraConfig

    encoder, text = tiny_encoder(), [SENTENCES[0]]
    encoder.add_adapter(LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=True))
    start = weights_of(encoder)
    with torch.no_grad():
        for name, value in encoder.named_parameters():
            if "lora_" in name:
                value.add_(torch.randn_like(value))
    trained = weights_of(encoder)
    assert 0 < len(trained) == len(start)

    def added():
        layers = [module for module in encoder.modules() if hasattr(module, "get_delta_weight")]
        return torch.stack([layer.get_delta_weight("default") for layer in layers])

    whole = added()
    mix(encoder, start, trained, 0.3)
    torch.testing.assert_close(added(), 0.3 * whole, atol=1e-5, rtol=0)
    mix(encoder, start, start, 0)
    assert not added().any() and np.isfinite(encoder.encode(text)).all()


def test_how_many_more_examples_a_gain_needs():
    draw = np.random.default_rng(0)
    rows = {"start": {"dev": 70.0, "guard": 0.0}, "a": {"dev": 71.0}, "b": {"dev": 69.0}, "c": {"dev": 73.0}}
    samples = {name: rows[name]["dev"] - 70 + draw.normal(size=RESAMPLES) for name in "abc"}
    alone = add_evidence({name: rows[name] for name in ("start", "a")}, {"a": samples["a"]})
    assert alone == {"a": pytest.approx(1.645**2, rel=0.1)}  # one standard error, where 1.645 are significant
    several = add_evidence(rows, samples)
    assert several.keys() == {"a", "c"} and several["a"] > 1.2 * alone["a"] and several["c"] < 1 < several["a"]


def test_nearly_all_of_the_gain_wins_if_it_agrees_more_with_the_start():
    def row(dev, guard, p=0.001):
        return {"dev": dev, "guard": guard, "p": p}

    rows = {"last": row(80.0, 60), "best": row(80.4, 55), "0.7": row(79.9, 70), "0.5": row(79.5, 90)}
    assert winner(rows, 70.0, 0.95) == "0.7"  # 0.95 x 10.4 = 9.88
    assert winner(rows, 70.0, 0.9) == "0.5" and winner(rows, 70.0, 1) == "best"
    assert winner(rows | {"0.7": row(79.9, 70, p=0.05)}, 70.0, 0.95) == "last"
    assert winner(rows | {"unsure": row(95.0, 99, p=0.2)}, 70.0, 0.95) == "0.7"
    assert winner({name: row(80.0, 90, p=0.05) for name in rows}, 70.0, 0.95) == "start" == winner({}, 70.0, 0.95)


def test_p_counts_the_candidates():
    draw = np.random.default_rng(0)
    together = draw.normal(size=RESAMPLES)
    rows = {"start": {"dev": 50.0}, **{str(n): {"dev": 52.0} for n in range(20)}}
    add_evidence(rows, {str(n): 2 + together for n in range(20)})  # 20 candidates that vary together: as one
    one = {"start": {"dev": 50.0}, "a": {"dev": 52.0}}
    add_evidence(one, {"a": 2 + together})
    assert rows["0"]["p"] == one["a"]["p"] == pytest.approx(0.0228, abs=0.01)
    assert one["a"]["low"] == pytest.approx(0.04, abs=0.15) and one["a"]["high"] == pytest.approx(3.96, abs=0.15)
    add_evidence(rows, {str(n): 2 + draw.normal(size=RESAMPLES) for n in range(20)})  # independent: 20 chances
    assert rows["0"]["p"] == pytest.approx(1 - (1 - 0.0228) ** 20, abs=0.05)
    for values in (np.full(RESAMPLES, 2.0), np.full(RESAMPLES, np.nan)):  # two pairs; constant scores
        add_evidence(one, {"a": values})
        assert one["a"]["p"] == 1


def test_a_guard_of_texts_or_of_scored_pairs(tmp_path):
    """Texts are scored by the start's own cosines, so its correlation is 100; pairs keep their scores."""
    encoder = tiny_encoder(double=False)
    (tmp_path / "guard.txt").write_text("\n".join(SENTENCES) + "\n")
    texts = guard_of(Data(guard=[str(tmp_path / "guard.txt")], columns={"score": "label"}), encoder, 0)
    result, _ = texts.score(encode_sentences(encoder, texts.sentences))
    assert {*texts.sentences} == {*SENTENCES} and result["spearman"] == pytest.approx(100)
    scored = guard_of(Data(guard=[pairs(tmp_path / "guard.tsv", 60)]), encoder, 0)
    expected = pandas.read_csv(tmp_path / "guard.tsv", sep="\t")
    assert list(scored.score.keywords["scores"]) == [*expected["score"]]


@pytest.mark.parametrize("tokens", [["ĠDogs", "Ġtrees", "ogsy", "Ġa", "Ã©tudes", "Ġ2024"], ["▁Dogs", "▁trees", "ogsy"],
                                    ["Dogs", "trees", "##ogsy", "[CLS]", "a"]])  # fmt: skip
def test_phrases_have_whole_words_of_the_vocabulary(tokens):
    tokenizer = SimpleNamespace(get_vocab=lambda: dict.fromkeys(tokens))
    phrases = random_phrases(tokenizer, np.random.default_rng(0))
    assert len(phrases) == 1000 and {len(phrase.split()) for phrase in phrases} == {4}
    assert {word for phrase in phrases for word in phrase.split()} == {"Dogs", "trees"}
    tokenizer.get_vocab = lambda: {"[CLS]": 0, "a": 1}
    with pytest.raises(ValueError, match=r"set data\.guard"):
        random_phrases(tokenizer, np.random.default_rng(0))


@pytest.mark.slow
def test_a_killed_run_saves_the_same(tmp_path):
    given = options(tmp_path)
    whole = run("train", None, **given)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(load("train", None, {**given, "output": str(tmp_path / "again")})))
    for step in ("18", "0"):
        code = python("-c", KILLED, recipe, step).returncode
        assert code == (9 if step == "18" else 0)
    again = json.loads((tmp_path / "again" / "metrics.json").read_text())
    assert again["certificate"]["saved"] == whole["certificate"]["saved"]
    first, second = weights(tmp_path / "out"), weights(tmp_path / "again")
    torch.testing.assert_close(second, first, atol=1e-6, rtol=0)  # two processes may differ by their rounding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.dev": None}, "evaluation.certificate needs a dev set"),
        ({"training.save_strategy": "no"}, "evaluation.certificate needs checkpoints"),
        ({"data.guard": ["guard.txt", "guard.tsv"]}, "mixes scored pairs and texts"),
        ({"evaluation.mixtures": [1.5]}, "evaluation.mixtures"),
    ],
)
def test_settings_that_contradict_each_other(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guard.txt").write_text("\n".join(SENTENCES) + "\n")
    write_pairs(tmp_path / "guard.tsv")
    with pytest.raises(ValueError, match=message):
        run("train", None, **options(tmp_path, **changes))
    assert not (tmp_path / "out" / "log.jsonl").exists()  # before any training


@pytest.mark.parametrize(
    ("columns", "loss", "rate", "reason", "more"),
    [
        (("premise", "hypothesis", "label"), "PearsonLoss", "2e-4", "0M parameters", {}),
        (("question", "answer"), "InfoNCELoss", "2e-5", "queries and passages", {}),
        (("question", "answer"), "InfoNCELoss", "2e-4", "an adapter", {"model.lora": {"r": 2}}),
    ],
)
def test_the_data_say_which_loss(tmp_path, capsys, columns, loss, rate, reason, more):
    labels = ["entailment", "neutral", "contradiction", "neutral"] * 10
    lines = ["\t".join(columns)]
    for n, label in enumerate(labels):
        cells = [f"{SENTENCES[n % 11]} {n}", f"{SENTENCES[(n + 1) % 11]} {n}", label]
        lines.append("\t".join(cells[: len(columns)]))
    (tmp_path / "own.tsv").write_text("\n".join(lines) + "\n")
    changes = {"data.train": [str(tmp_path / "own.tsv")], "data.dev": None, "training": {"min_steps": 4}, "loss": None}
    metrics = run("train", "adapt", **options(tmp_path, **changes, **{"evaluation.guard_budget": None}, **more))
    output = capsys.readouterr().out
    assert f", so the loss is {loss}\n" in output and f"learning rate {float(rate):g}, for {reason}\n" in output
    assert f"class_path: {loss}" in (tmp_path / "out" / "recipe.yaml").read_text()
    assert metrics["certificate"]["metric"] == ("spearman" if loss == "PearsonLoss" else "ndcg@10")
