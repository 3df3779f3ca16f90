"""The registry of tasks: names, suites, reading before encoding, averages and the table."""

import json

import numpy as np
import pytest

from raoe_train.cli import main
from raoe_train.data.files import write_rows
from raoe_train.evaluation import tasks
from raoe_train.evaluation.sts import of_pairs
from raoe_train.evaluation.tasks import SUITES, read_tasks, split_word, suite_tasks, table
from raoe_train.training.report import summary
from tests.tiny import SENTENCES, evaluate_encoder, tiny_encoder


@pytest.fixture(scope="module")
def model():
    return tiny_encoder(double=False)


@pytest.fixture
def folder(tmp_path):
    pairs = [
        {"subset": "ab"[i % 2], "score": i % 5, "sentence1": SENTENCES[i % 11], "sentence2": SENTENCES[j % 11]}
        for i, j in zip(range(20), range(1, 61, 3), strict=True)
    ]
    write_rows(tmp_path / "sts" / "stsb.tsv", list(pairs[0]), pairs)
    labelled = [
        {"split": ("train", "test")[i % 2], "label": "xy"[i // 2 % 2], "text": SENTENCES[i % 11]} for i in range(44)
    ]
    write_rows(tmp_path / "transfer" / "cr.tsv", list(labelled[0]), labelled)
    write_rows(tmp_path / "polarity" / "cr.tsv", ["label", "text"], [])
    return tmp_path


WORDS = ["stsb", "cr"]


def test_words():
    assert split_word("stsb") == ("sts", "stsb")
    assert split_word("MR") == ("transfer", "MR")
    assert split_word("sst2#dev") == ("transfer", "sst2#dev")
    assert split_word("transfer:stsb") == ("transfer", "stsb")
    for source in ("a/b.tsv#test", "builtin#test", "hub:mteb/sts12#test", "hub:x"):
        assert split_word(source) == ("sts", source)
    assert split_word("retrieval:a/b.jsonl") == ("retrieval", "a/b.jsonl")
    with pytest.raises(ValueError, match=r"unknown kind 'transfr' \(did you mean 'transfer'\?\); kinds: sts, transfer"):
        split_word("transfr:mr")


def test_suites():
    assert suite_tasks(["sts", "all"]) == [task for names in SUITES.values() for task in names]
    with pytest.raises(ValueError, match="sts, transfer, all; got 'mteb'"):
        suite_tasks(["mteb"])


def test_all_kinds_together(model, folder, monkeypatch):
    encoded = []
    real = model.encode
    monkeypatch.setattr(model, "encode", lambda texts, **options: (encoded.append(texts), real(texts, **options))[1])
    result = evaluate_encoder(model, WORDS, folder)
    assert sorted(encoded[0]) == sorted(SENTENCES) and len(encoded) == 1  # each sentence once for all of them
    alone = {word: evaluate_encoder(model, [word], folder)["tasks"][word] for word in WORDS}
    assert result["tasks"] == alone
    assert [(task["kind"], task["main"]) for task in alone.values()] == [
        ("sts", "spearman"), ("transfer", "accuracy")
    ]  # fmt: skip
    mains = [alone["stsb"]["spearman"], alone["cr"]["accuracy"]]
    assert result["average"] == pytest.approx(np.mean(mains))
    assert result["averages"] == dict(zip(("sts", "transfer"), mains, strict=True))
    assert "averages" not in evaluate_encoder(model, ["stsb"], folder)


def test_subsets_of_sts_by_hand():
    """All six together: ranks (cosine) 1 2 3 4 5 6 and (score) 3 1 2 4 6 5."""
    cosines = np.array([-0.9, -0.5, -0.1, 0.2, 0.5, 0.8])
    first = np.stack([cosines, np.sqrt(1 - cosines**2)], axis=1)
    second = np.tile([1.0, 0.0], (6, 1))
    texts = [str(number) for number in range(6)]

    def task(subset):
        from datasets import Dataset

        columns = {"sentence1": texts, "sentence2": texts, "score": [3.0, 1.0, 2.0, 4.0, 6.0, 5.0], "subset": subset}
        return of_pairs(Dataset.from_dict(columns))

    result, examples = task(["a", "a", "a", "b", "b", "b"]).score(np.concatenate([first, second]))
    np.testing.assert_allclose(examples.values, cosines)
    assert examples.gold.tolist() == [3, 1, 2, 4, 6, 5]
    # differences of ranks 2 -1 -1 0 1 -1: 1 - 6 x 8 / (6 x 35)
    assert result["spearman"] == pytest.approx(100 * (1 - 48 / 210)) and result["pairs"] == 6
    # a: ranks 1 2 3 against 3 1 2, 1 - 6 x 6 / 24 = -0.5; b: 1 2 3 against 1 3 2, 1 - 6 x 2 / 24 = 0.5
    assert {name: subset["spearman"] for name, subset in result["subsets"].items()} == {
        "a": pytest.approx(-50),
        "b": pytest.approx(50),
    }
    assert result["mean"]["spearman"] == pytest.approx(0) and result["subsets"]["b"]["pairs"] == 3
    # one pair alone has no correlation, and the mean none either
    result, _ = task(["a", "a", "a", "a", "a", "b"]).score(np.concatenate([first, second]))
    assert result["subsets"]["b"]["spearman"] is None and result["mean"] == {"spearman": None, "pearson": None}
    assert "subsets" not in task(["a"] * 6).score(np.concatenate([first, second]))[0]


def test_everything_is_read_before_anything_is_encoded(folder, monkeypatch):
    monkeypatch.setattr(tasks, "encode_sentences", None)
    with pytest.raises(ValueError, match=r"(?s)no task 'stsx'.*did you mean 'stsb'.*\nno task 'subj'"):
        evaluate_encoder(None, ["stsb", "stsx", "subj"], folder)
    with pytest.raises(ValueError, match="no task 'mrx'"):
        evaluate_encoder(None, ["cr", "transfer:mrx"], folder)


def test_a_condition_is_for_sts_only(folder):
    with pytest.raises(ValueError, match=r"task 'cr': the prompt contains \{condition\}, but transfer tasks have"):
        read_tasks(["cr"], folder, prompt="About {condition}: {text}")


def test_table_of_several_kinds():
    result = {
        "tasks": {
            "stsb": {"kind": "sts", "main": "spearman", "spearman": 81.254, "pearson": None, "pairs": 9, "mean": {}},
            "trec": {"kind": "transfer", "main": "accuracy", "accuracy": 90.0, "dev_accuracy": 91.0, "examples": 5},
            "mrpc": {"kind": "transfer", "main": "accuracy", "accuracy": 70.0, "dev_accuracy": 71.0, "examples": 6,
                     "f1": 80.0},
        },
        "average": 80.4, "averages": {"sts": 81.254, "transfer": 80.0},
    }  # fmt: skip
    blocks = [[line.split() for line in block.splitlines()] for block in table(result).split("\n\n")]
    assert blocks == [
        [["task", "spearman", "pearson", "pairs"], ["stsb", "81.25", "undefined", "9"], ["average", "81.25"]],
        [
            ["task", "accuracy", "dev_accuracy", "examples", "f1"],
            ["trec", "90.00", "91.00", "5", "-"],
            ["mrpc", "70.00", "71.00", "6", "80.00"],
            ["average", "80.00"],
        ],
        [["average", "of", "all", "80.40"]],
    ]


def test_the_summary_of_training_shows_main_metrics():
    after = {"tasks": {"mr": {"kind": "transfer", "main": "accuracy", "accuracy": 75.5}}, "average": 75.5}
    earlier = {"tasks": {"mr": {"main": "accuracy", "accuracy": 70.25}}}
    for before, *shown in (({}, "-", "-"), (earlier, "70.25", "+5.25")):
        row = summary({"before": before, "after": after}).splitlines()[1].split()
        assert row == ["mr", shown[0], "75.50", shown[1]]


def test_command_line(model, folder, tmp_path, capsys):
    saved, output = tmp_path / "model", tmp_path / "out.json"
    model.save(str(saved))
    command = ["evaluate", "--model.name", str(saved), "--model.device", "cpu", "--data.dir", str(folder)]
    assert main([*command, "--tasks", *WORDS, "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert list(result["tasks"]) == WORDS and result["versions"]["scikit-learn"]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["average", "of", "all", f"{result['average']:.2f}"]
    assert main([*command, "--suite", "sts"]) == 2
    error = capsys.readouterr().err
    assert all(f"no task '{name}'" in error for name in ("sts12", "sts16", "sick")) and "no task 'stsb'" not in error
