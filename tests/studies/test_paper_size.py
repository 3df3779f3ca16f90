"""The papers' tables at their own settings, with tiny models: a dry run of each recipe, three steps of some cells."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from transformers import AutoModel, BertConfig, ModernBertConfig

from benchmarks.studies.sweep import sweep
from raoe_train import run
from raoe_train.data.files import write_rows
from tests.data.made import rows_in
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


def stand_ins(folder: Path) -> None:
    """Folders by the names of the hub, in which these names are looked up first."""
    tokenizer = tiny_encoder(double=False).tokenizer
    for name in (*BERTS, *MODERN):
        kind = ModernBertConfig(**SIZES, pad_token_id=0) if name in MODERN else BertConfig(**SIZES)
        AutoModel.from_config(kind).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, decoder in DECODERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        Path(saved_decoder(folder, decoder)).rename(folder / name)


def prepared(folder: Path) -> None:
    """FOLDER/data, and what a sweep's own `prepare` makes of it in FOLDER/out."""
    words = ("entailment", "neutral", "contradiction")
    some = rows_in("builtin#train")[:120]
    nli = rows_in("builtin-nli#train")[:96]
    nli = [{**row, "label": words[row["label"]]} for row in nli]
    for name in ("snli", "mnli"):
        rows = [{**row, "split": split} for split in ("train", "dev", "test", "dev_matched") for row in nli]
        write_rows(folder / f"data/nli/{name}.jsonl.gz", ["split", "label", "premise", "hypothesis"], rows)
    columns = ["score_1", "score_2", "score", "label", "premise", "hypothesis"]
    cosines = [{**row, **dict.fromkeys(columns[:3], place / 96)} for place, row in enumerate(nli)]
    write_rows(folder / "out/nli.jsonl.gz", columns, cosines)
    for name in STS:
        rows = [{**row, "split": split} for split in ("train", "dev", "test") for row in some[:24]]
        rows = [{**row, "label": words[place % 3]} for place, row in enumerate(rows)]
        columns = ["split", "score", "sentence1", "sentence2", *(["label"] if name == "sick" else [])]
        write_rows(folder / f"data/sts/{name}.jsonl.gz", columns, rows)
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
    """What `mine` would make, in FOLDER/out/mined."""
    kinds = {"triplet": ["anchor", "positive", "negative"], "positive": ["sentence1", "sentence2"]}
    kinds |= {kind: ["sentence1", "sentence2", last] for kind, last in (("contrastive", "label"), ("random", "score"))}
    for kind, columns in kinds.items():
        lasts = SENTENCES if kind == "triplet" else [0, 1] * 6
        values = [(SENTENCES[n], SENTENCES[n - 1], lasts[n - 2]) for n in range(11)]
        rows = [dict(zip(columns, row, strict=False)) for row in values]
        for name in ("sst2", "headlines"):
            write_rows(folder / f"out/mined/{name}-{kind}.jsonl", columns, rows)


LLAMA = next(iter(DECODERS))


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    stand_ins(folder)
    prepared(folder)
    mined(folder)
    return folder


NLI = "data/nli/snli.jsonl.gz#train+data/nli/mnli.jsonl.gz#train"
RECIPES = {
    **dict.fromkeys(("raoe-s1", "raoe-qwen2.5-7b"), "out/nli.jsonl.gz"),
    **dict.fromkeys(("raoe-s2", "raoe-s2-qwen2.5-7b"), "data/sts/stsb.jsonl.gz#train"),
    **dict.fromkeys(("simcse", "simcse-qwen2.5-7b", "sbert-softmax", "cosent", "angle", "bellm"), NLI),
    "ranking-post": "data/lists/ranking-sentences.jsonl.gz",
    "bellm-csts": "data/csts_train.csv",
    "margins": "out/mined/sst2-triplet.jsonl",
}

TASKS = {"bellm-csts": ["data/csts_train.csv"]}  # its prompt has conditions


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dry_run_of_each_recipe(papers, monkeypatch, recipe):
    monkeypatch.chdir(papers)
    before = sorted(papers.rglob("*"))
    # these evaluate every so many steps
    dev = "data/sts/stsb.jsonl.gz#dev" if recipe == "ranking-post" else None
    tasks = {"tasks": TASKS.get(recipe, ["stsb"])}
    asked = {"data": {"train": [RECIPES[recipe]], "dir": "data", "dev": dev}, "evaluation": tasks}
    model = {"device": "cpu"} | ({"name": BERTS[2]} if recipe == "ranking-post" else {})
    found = run("train", recipe, dry_run=True, model=model, **asked)
    assert found["steps"] > 0 and found["seconds"] > 0 and found["peak_memory_mb"] > 0
    assert sorted(papers.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "only", "model"),
    [
        ("bellm-study", ["last-seed42", "causal-seed42"], LLAMA),
        ("ranking-study", ["minilm-seed42", "weak-name-qiyuw_pcl-bert-base-uncased-seed42"], BERTS[2]),
        ("margins", ["sst2-minilm-triplet-margin-0.1-name-intfloat_e5-small-v2-seed42"], None),
    ],
)
def test_three_steps_at_the_papers_settings(tmp_path, monkeypatch, study, only, model):
    """From prepared files to the report, mining too, with tiny models: 4 bits, LoRA, a teacher and all."""
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path)
    prepared(tmp_path)
    training = {"max_steps": 3, "save_strategy": "no", "eval_strategy": "no", "eval_steps": None}
    few = {"training": training, "model": {"device": "cpu"}}
    task = "polarity:sst2-phrases" if study == "margins" else "stsb"
    changes = {"scales": {"paper": {"settings": few, "tasks": [task]}}}
    found = sweep(study, "out", data_dir="data", scale="paper", model=model, only=only, changes=changes)
    # other cells may have the same settings, and then the same run
    assert found["failed"] == [] and {row["variant"] for row in found["results"]} >= {name[:-7] for name in only}
    for row in found["results"]:
        assert row["steps"] == 3 and list(row["after"]["tasks"]) == [task]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl"])
def test_the_ablation_on_two_cores_runs_on_prepared_files(tmp_path, monkeypatch, ending):
    """At the study's own size but for the steps: teachers are trained, SNLI and MNLI scored, both starts trained."""
    monkeypatch.chdir(tmp_path)
    stand_ins(tmp_path)
    prepared(tmp_path)
    for path in [*(tmp_path / "data").rglob("*.jsonl.gz")] if ending == ".jsonl" else []:
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    cells = ["minilm-raoe-seed42", "scratch-simcse-enc-seed42"]
    changes = {"settings.training.max_steps": 3, "variants.minilm-raoe.training.max_steps": 3, "tasks": ["stsb"],
               "prepare.second.training.max_steps": 3}  # fmt: skip
    found = sweep("raoe-ablation", "out", data_dir="data", model=BERTS[0], only=cells, changes=changes)
    assert found["failed"] == [] and {f"{row['variant']}-seed42" for row in found["results"]} >= {*cells}
    assert all(row["steps"] == 3 for row in found["results"])
