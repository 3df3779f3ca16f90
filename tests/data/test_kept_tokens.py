"""Kept tokens: the features are the encoder's, bit for bit, and so is what a run gives."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import version

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from torch.utils.data import DataLoader

from raoe_train import run
from raoe_train.data import tokens
from raoe_train.data.tables import to_table
from raoe_train.data.tokens import TokenStore, same, with_tokens
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.named import Model
from raoe_train.encoders.prompts import apply_template
from raoe_train.losses.collators import ScoreLabelCollator
from tests.data.test_large_data import NLI, parsed
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import settings, write_pairs


def encoders(folder):
    """Encoders of both kinds: BERT, padded right, with a prompt and a suffix; a decoder, padded left."""
    bert, prompted, suffixed = (tiny_encoder(double=False) for _ in range(3))
    apply_template(prompted, "query: {text}")
    apply_template(suffixed, '{text} so:"')
    decoder = load_encoder(
        Model(name=saved_decoder(folder), device="cpu", pooling="last", max_seq_length=12, prompt="q: {text}")
    )
    left = load_encoder(Model(name=saved_decoder(folder), device="cpu", pooling="last", max_seq_length=12))
    left.tokenizer.padding_side = "left"
    return {"bert": bert, "prompted": prompted, "suffixed": suffixed, "decoder": decoder, "left": left}


LONG = [*SENTENCES, " ".join(SENTENCES), "ünï 🎸", "dinner is being cooked", " dinner is  being cooked"]


@pytest.mark.parametrize("name", ["bert", "prompted", "suffixed", "decoder", "left"])
def test_kept_tokens_are_the_encoders(tmp_path, name, capsys, monkeypatch):
    monkeypatch.setattr("raoe_train.data.tokens.SIZE", 4)
    model = encoders(tmp_path)[name]
    prompt = model.prompts.get(model.default_prompt_name) if model.default_prompt_name else None
    rows = [{"sentence1": text, "label": 1} for text in LONG]
    data = {"a": to_table(rows)}
    store = with_tokens(model, data, str(tmp_path / "cache"), prompt)
    assert isinstance(store, TokenStore) and len(store) == len(set(LONG))
    asked = []

    def preprocess(*arguments, **options):
        asked.append(options)
        return model.preprocess(*arguments, **options)

    store.preprocess = preprocess
    copy = pickle.loads(pickle.dumps(TokenStore(store.folder, len)))
    for texts in (LONG, LONG[::-1], LONG[:1], LONG[3:7], [LONG[4]] * 3):
        expected = dict(model.preprocess(texts, prompt=prompt, task=None))
        assert same(store(texts, prompt=prompt, task=None), expected)
        assert same(copy(texts, prompt=prompt), expected)
    lengths = [len(row) for row in store.rows(LONG)]
    assert max(lengths) == model.max_seq_length > min(lengths)  # one is cut, others are padded
    assert not asked
    for texts, options in (
        ([*LONG[:2], "never seen"], {"prompt": prompt}),
        (LONG, {"prompt": "another: "}),
        (LONG, {"prompt": prompt, "max_length": 5}),
        (LONG, {"prompt": prompt, "task": "query"}),
        ([("a pair", "of texts")], {"prompt": prompt}),
    ):
        assert same(store(texts, **options), dict(model.preprocess(texts, **options)))
        assert asked.pop() == {"prompt": options["prompt"], **options} and not asked
    assert "tokens of 14 different sentences" in capsys.readouterr().out


def test_tokens_are_found_again_by_what_they_depend_on(tmp_path, monkeypatch):
    cache = str(tmp_path / "cache")

    def table(texts):
        return {"a": to_table([{"text": text} for text in texts])}

    def stores(model, texts=LONG, prompt=None):
        found = with_tokens(model, table(texts), cache, prompt)
        assert same(found(texts, prompt=prompt), dict(model.preprocess(texts, prompt=prompt)))
        return len(list((tmp_path / "cache").iterdir()))

    model = tiny_encoder()
    assert stores(model) == 1
    model.preprocess(["a"], processing_kwargs={"text": {"max_length": 3}})  # what a call leaves in the tokenizer
    assert stores(model) == stores(tiny_encoder()) == 1
    assert stores(model, prompt="query: ") == 2
    assert stores(model, LONG[:-1]) == 3
    model.max_seq_length = 9
    assert stores(model) == 4
    model.tokenizer.add_tokens(["dinner"])
    assert stores(model) == 5
    model.tokenizer.padding_side = "left"
    assert stores(model) == 6
    model[0].processing_kwargs = {"text": {"max_length": 5}}
    assert stores(model) == 7
    monkeypatch.setattr(tokens, "version", lambda package: "0.1" if package == "tokenizers" else version(package))
    assert stores(model) == 8


@pytest.mark.parametrize("damage", [lambda data: bytes(len(data)), lambda data: data[:-4], lambda data: None])
def test_a_damaged_cache_is_made_anew(tmp_path, caplog, damage):
    """As a power cut leaves it: files of zeros, cut ones, none."""
    model, data = tiny_encoder(), {"a": to_table([{"text": text} for text in LONG])}
    folder = with_tokens(model, data, str(tmp_path), None).folder
    whole = (folder / "ids").read_bytes()
    if (left := damage(whole)) is None:
        (folder / "ids").unlink()
    else:
        (folder / "ids").write_bytes(left)
    assert with_tokens(model, data, str(tmp_path), None).folder == folder
    assert (folder / "ids").read_bytes() == whole and "is damaged, and is made anew" in caplog.text


def test_features_that_cannot_be_kept(tmp_path, capsys):
    data = {"a": to_table([{"text": text} for text in LONG])}
    cache = str(tmp_path / "cache")
    tokenizer = tiny_encoder().tokenizer
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=4)], device="cpu")
    typed = tiny_encoder()
    typed[0].processing_kwargs = {"text": {"return_special_tokens_mask": True}}
    for model, why in ((static, "no fast tokenizer"), (typed, "input_ids, "), (typed, "special_tokens_mask")):
        assert with_tokens(model, data, cache, None) == model.preprocess
        said = capsys.readouterr().out
        assert said.startswith("the tokens of this encoder are not kept: ") and why in said and said.count("\n") == 1


def test_a_hash_that_two_texts_share(tmp_path, monkeypatch):
    """In the first 64 bits: the second 64 tell them apart, and one of them goes to the tokenizer."""
    real = tokens.hashes

    def clashing(texts):
        found = np.array(real(texts))
        found[:, 0] %= 3
        return found

    monkeypatch.setattr(tokens, "hashes", clashing)
    model = tiny_encoder()
    store = with_tokens(model, {"a": to_table([{"t": text} for text in LONG])}, str(tmp_path), None)
    found = [text for text in LONG if store.rows([text]) is not None]
    assert 1 <= len(set(found)) <= 3 and len(store) == len(set(LONG))
    for text in LONG:
        assert same(store([text]), dict(model.preprocess([text])))


def test_workers_use_kept_tokens(tmp_path):
    model = tiny_encoder(double=False)
    rows = [{"sentence1": text, "sentence2": LONG[0], "score": 0.5} for text in LONG]
    data = to_table(rows)
    store = with_tokens(model, {"a": data}, str(tmp_path), None)
    store.preprocess = len  # would fail
    batches = DataLoader(data, batch_size=4, num_workers=2, collate_fn=ScoreLabelCollator(preprocess_fn=store))
    expected = DataLoader(data, batch_size=4, collate_fn=ScoreLabelCollator(preprocess_fn=model.preprocess))
    for one, other in zip(batches, expected, strict=True):
        assert torch.equal(one.pop("label")["score"], other.pop("label")["score"])
        assert same(one, other)


@pytest.mark.parametrize("loss", ["raoe", "multiple_negatives", "infonce"])
def test_a_run_with_a_cache_is_the_run_without(tmp_path, monkeypatch, loss):
    """Bit for bit; and the second with it neither parses nor tokenises."""
    source = tmp_path / "train.tsv"
    write_pairs(source)
    if loss == "infonce":
        source.write_text(NLI)
    made = settings(tmp_path, **{"data.dev": None, "data.train": [str(source)], "model.prompt": "query: {text}"})
    made["loss"] = {"name": loss}
    made["training"] = {"epochs": 1, "batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    encoder = tmp_path / "encoder"
    tiny_encoder(dropout=0.2, double=False).save(str(encoder))
    made["model.name"] = str(encoder)
    seen = parsed(monkeypatch)
    tokenised = []
    steps = {"raoe": 10, "multiple_negatives": 10, "infonce": 3}[loss] * (3 if loss == "infonce" else 2)
    monkeypatch.setattr(SentenceTransformer, "preprocess", counting(tokenised, SentenceTransformer.preprocess))
    monkeypatch.setattr(tokens, "write_store", counting(written := [], tokens.write_store))
    results, counts = {}, {}
    for name in ("without", "kept", "found"):
        seen.clear()
        tokenised.clear()
        cache = None if name == "without" else str(tmp_path / "cache")
        run("train", "raoe-s1", **{**made, "data.cache_dir": cache, "output": str(tmp_path / name)})
        results[name] = load_file(tmp_path / name / "model.safetensors")
        counts[name] = len(seen), len(tokenised)
        assert len(written) == (name != "without")
        log = [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        results[name + " losses"] = [entry.get("loss") for entry in log]
    other = counts["without"][1] - steps  # the model card's
    assert other >= 0 and counts == {"without": (1, steps + other), "kept": (1, 1 + other), "found": (0, other)}
    for name in ("kept", "found"):
        assert results[name + " losses"] == results["without losses"]
        for key, weight in results["without"].items():
            assert torch.equal(results[name][key], weight)


def counting(calls, real):
    """`real`, with each call put on a list."""

    def counted(*arguments, **options):
        calls.append(arguments)
        return real(*arguments, **options)

    return counted
