"""Each job says once a source how many of its texts the encoder cuts."""

import itertools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from raoe_train import run
from raoe_train.encoders.embed import print_cut
from tests.tiny import saved_encoder, tiny_encoder

SHORT = ["a dog", "a train", "the dog", "the train", "two dogs", "dinner", "music", "people", "a man", "birds", "snow"]
LONG = ["the dog runs " * 9 + end for end in ("once", "twice", "again")]  # 28 words, so more than 16 tokens


@pytest.fixture
def texts(tmp_path):
    """Ten texts, of which three are long, with a class."""
    path = tmp_path / "texts.jsonl"
    rows = [{"text": text, "label": "ab"[n % 2]} for n, text in enumerate([*SHORT[:7], *LONG])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    """Twelve pairs, of which three have a long second text."""
    path = tmp_path / "pairs.tsv"
    rows = [f"{SHORT[n % 11]}\t{text}\t{n / 12}" for n, text in enumerate([*LONG, *SHORT[:9]])]
    path.write_text("sentence1\tsentence2\tgold\n" + "\n".join(rows) + "\n")
    return str(path)


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "max_seq_length" in line]


@pytest.mark.parametrize("job", ["encode", "evaluate", "mine", "score"])
def test_jobs(encoder, texts, pairs, tmp_path, capsys, job):
    """Each frozen encoder counts for itself."""
    other = saved_encoder(tmp_path / "other")
    options = {
        "encode": {"data.input": texts, "output": str(tmp_path / "x.npy")},
        "evaluate": {"tasks": [pairs], "data.columns": {"score": "gold"}},
        "mine": {"data.input": texts, "loss": "triplet", "output": str(tmp_path / "x.tsv"), "mining.threshold": 0.0},
        "score": {"teachers": [encoder, other], "data.input": pairs, "output": str(tmp_path / "x.tsv")},
    }
    run(job, None, **({} if job == "score" else {"model.name": encoder}), **options[job])
    sources = {"encode": [texts], "evaluate": [pairs], "mine": [f"reference {encoder}"],
               "score": [f"teacher {encoder}", f"teacher {other}"]}[job]  # fmt: skip
    said = f"3 of {10 if job in ('encode', 'mine') else 24} texts are longer than max_seq_length 16, and are truncated"
    assert lines(capsys) == [f"{source}: {said}" for source in sources]


def test_train(encoder, pairs, tmp_path, capsys):
    """The trainer's prompt counts, the encoder has none."""
    source = tmp_path / "scored.tsv"
    source.write_text(Path(pairs).read_text().replace("gold", "score"))
    options = {"loss": "CoSENTLoss", "training.num_train_epochs": 1, "evaluation.tasks": [str(source)],
               "training.prompts": "a b c d e f g h i j k l m n"}  # fmt: skip
    run("train", None, **{"model.name": encoder, "data.train": [str(source)], "data.dev": str(source),
                          "output": str(tmp_path / "out"), **options})  # fmt: skip
    said = "24 texts are longer than max_seq_length 16, and are truncated"
    assert lines(capsys) == [f"scored: 24 of {said}", f"scored.tsv: 3 of {said}", f"{source}: 3 of {said}"]
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["truncated"] == {"scored": 24, "scored.tsv": 3, str(source): 3}


@pytest.mark.parametrize("prompt", ["", "query: "])
@pytest.mark.parametrize("length", [4, 16])
def test_counts_are_those_of_the_tokenizer(encoder, capsys, prompt, length):
    """Texts of every length around the limit, in several scripts; equal texts count each time."""
    model = tiny_encoder(double=False)
    model.max_seq_length = length
    words = "the dog Über 東京 naïve 🙂 train".split()
    every = [" ".join(itertools.islice(itertools.cycle(words), count)) for count in range(1, 45)] * 2
    every += ["x" * count for count in range(1, 60)]
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    cut = 0
    for text in every:
        given = tokenizer(prompt + text, truncation=True, max_length=length, return_overflowing_tokens=True)
        cut += bool(given.encodings[0].overflowing)
    print_cut(model, iter(every), "here", prompt)
    assert cut and lines(capsys) == [
        f"here: {cut} of {len(every)} texts are longer than max_seq_length {length}, and are truncated"
    ]
