"""Tiny stand-ins for the papers' tables: models under hub names, and files as `raoe-train prepare` writes them."""

from __future__ import annotations

import itertools
from pathlib import Path

from transformers import BertConfig, BertModel, ModernBertConfig

from raoe_train.data.files import write_rows
from raoe_train.data.sources import open_source
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES, tiny_encoder

TABLE_4 = ("princeton-nlp/unsup-simcse-bert-base-uncased", "ffgcc/InfoCSE-bert-base", "qiyuw/pcl-bert-base-uncased",
           "perceptiveshawty/rankcse-listmle-bert-base-uncased")  # fmt: skip
FOUR = ("intfloat/e5-small-v2", "thenlper/gte-base", "thenlper/gte-small", "sentence-transformers/all-MiniLM-L6-v2")
# of RAOE's two teachers, too
BERTS = ("bert-base-uncased", "bert-large-uncased", "leoner24/multicse-bert-base-uncased", "intfloat/e5-small",
         "princeton-nlp/unsup-simcse-bert-large-uncased", "voidism/diffcse-bert-base-uncased-sts", *TABLE_4, *FOUR,
         "Lajavaness/bilingual-embedding-large", "jinaai/jina-embeddings-v3")  # fmt: skip
MODERN = ("answerdotai/ModernBERT-base", "answerdotai/ModernBERT-large")
DECODERS = {"meta-llama/Llama-2-7b-hf": "llama", "Qwen/Qwen2.5-7B": "qwen2"}
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=120)
STS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick")


def stand_ins(folder: Path, *, weights: bool) -> None:
    """Folders named like models on a hub, which take precedence over the hub."""
    tokenizer = tiny_encoder(double=False).tokenizer
    for name in (*BERTS, *MODERN):
        kind = ModernBertConfig(**SIZES, pad_token_id=0) if name in MODERN else BertConfig(**SIZES)
        kind.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        if weights and name in BERTS:
            BertModel(kind).save_pretrained(folder / name)
    for name, decoder in DECODERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        Path(saved_decoder(folder, decoder)).rename(folder / name)
        if not weights:
            (folder / name / "model.safetensors").unlink()


def prepared(folder: Path) -> None:
    """FOLDER/data, and FOLDER/out with the results of a sweep's `prepare`."""
    words = ("entailment", "neutral", "contradiction")
    some = [row for _, row in itertools.islice(open_source("builtin#train").rows, 120)]
    nli = [row for _, row in itertools.islice(open_source("builtin-nli#train").rows, 96)]
    nli = [{**row, "label": words[row["label"]]} for row in nli]
    for name in ("snli", "mnli"):
        rows = [{**row, "split": "train"} for row in nli]
        write_rows(folder / f"data/nli/{name}.jsonl.gz", ["split", "label", "premise", "hypothesis"], rows)
    columns = ["score_1", "score_2", "score", "label", "premise", "hypothesis"]
    cosines = [{**row, **dict.fromkeys(columns[:3], place / 96)} for place, row in enumerate(nli)]
    write_rows(folder / "out/nli.jsonl.gz", columns, cosines)
    for name in STS:
        rows = [{**row, "split": split} for split in ("train", "dev", "test") for row in some[:24]]
        write_rows(folder / f"data/sts/{name}.jsonl.gz", ["split", "score", "sentence1", "sentence2"], rows)
    lists = [{"sentences": SENTENCES[place:] + SENTENCES[:place]} for place in range(len(SENTENCES))]
    write_rows(folder / "data/lists/ranking-sentences.jsonl.gz", ["sentences"], lists)
    texts = dict.fromkeys(row["sentence1"] for row in some)
    conditions = [{**row, "condition": "the place", "label": 1 + number % 5} for number, row in enumerate(some[:24])]
    write_rows(folder / "data/csts_train.csv", ["sentence1", "sentence2", "condition", "label"], conditions)
    for name in ("sst2-phrases", "headlines-split"):
        rows = [{"split": "test" if place < 14 else "train", "label": place % 2, "text": text}
                for place, text in enumerate(texts)]  # fmt: skip
        write_rows(folder / f"data/polarity/{name}.jsonl.gz", ["split", "label", "text"], rows)


def mined(folder: Path) -> None:
    """FOLDER/out/mined, as `mine` writes it."""
    kinds = {"triplet": ["anchor", "positive", "negative"], "positive": ["sentence1", "sentence2"]}
    kinds |= {kind: ["sentence1", "sentence2", last] for kind, last in (("contrastive", "label"), ("random", "score"))}
    for kind, columns in kinds.items():
        lasts = SENTENCES if kind == "triplet" else [0, 1] * 6
        values = [(SENTENCES[n], SENTENCES[n - 1], lasts[n - 2]) for n in range(11)]
        rows = [dict(zip(columns, row, strict=False)) for row in values]
        for name in ("sst2", "headlines"):
            write_rows(folder / f"out/mined/{name}-{kind}.jsonl", columns, rows)
