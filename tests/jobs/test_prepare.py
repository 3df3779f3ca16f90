"""Public sets from the publishers' files and a hub's layout, all tiny. SentEval's folders: tests/data."""

import csv
import json

import pytest

import raoe_train as rt
from raoe_train.cli import main
from raoe_train.data.pairs import pair_table
from raoe_train.data.public import PAPERS, public_sets
from raoe_train.data.rows import list_table
from tests.data.made import rows_in

NLI = [("p1", "h1", "entailment"), ("p2", "h2", "-"), ("p3", "h3", "contradiction"), ("p\t4", "h\n4", "neutral")]


@pytest.fixture
def copies(tmp_path):
    """A folder of downloads: SNLI in its publishers' format."""
    folder = tmp_path / "copies"
    folder.mkdir()
    for split in ("train", "dev", "test"):
        lines = [{"gold_label": label, "sentence1": a, "sentence2": b, "pairID": "x"} for a, b, label in NLI]
        (folder / f"snli_1.0_{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_publishers_files(copies, tmp_path):
    copied, output = str(copies), str(tmp_path / "data")
    assert main(["prepare", "snli", "--copies", copied, "--counts", "false", "--output", output]) == 0
    made = rt.prepare(names=["snli"], copies=copied, counts=False, output=output)["sets"]["snli"]  # already finished
    assert made["rows"] == {"train": 3, "dev": 3, "test": 3} and made["left_out"] == {"no gold label": 3}
    assert made["from"] == str(copies) and made["licence"] == "CC BY-SA 4.0"
    assert made["output"] == str(tmp_path / "data" / "nli" / "snli.jsonl.gz")
    assert rows_in(made["output"])[:2] == [
        {"split": "train", "sentence1": "p1", "sentence2": "h1", "label": "entailment"},
        {"split": "train", "sentence1": "p3", "sentence2": "h3", "label": "contradiction"},
    ]
    dev, counts = pair_table(f"{made['output']}#dev")
    assert dev["label"][:] == [0, 2, 1] and dev["sentence2"][2] == "h\n4" and counts["dropped"] == {}


def test_a_folder_in_the_hubs_layout(copies, tmp_path):
    from datasets import ClassLabel, Dataset, Features, Value

    classes = ClassLabel(names=["entailment", "neutral", "contradiction"])
    kinds = Features({"premise": Value("string"), "hypothesis": Value("string"), "label": classes})
    folder = tmp_path / "clones" / "stanfordnlp" / "snli" / "plain_text"
    for split, labels in (("train", [2, -1, 0]), ("validation", [1]), ("test", [0])):
        data = {"premise": ["p"] * len(labels), "hypothesis": ["h"] * len(labels), "label": labels}
        folder.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(data, features=kinds).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    options = {"copies": str(tmp_path / "clones"), "counts": False, "output": str(tmp_path / "data")}
    made = rt.prepare(names=["snli"], **options)["sets"]["snli"]
    assert made["rows"] == {"train": 2, "dev": 1, "test": 1} and made["left_out"] == {"no gold label": 1}
    assert [row["label"] for row in rows_in(made["output"])] == ["contradiction", "entailment", "neutral", "entailment"]


def test_lists_as_text(tmp_path):
    with open(tmp_path / "rankingsentences_n:32.csv", "w", newline="") as file:
        csv.writer(file).writerows([["list_sent"], [str(["a", 'b "c"', "d's"])], ["['e', 'f', 'g']"]])
    options = {"copies": str(tmp_path), "output": str(tmp_path / "data")}
    made = rt.prepare(names=["ranking-sentences"], **options, counts=False)
    path = made["sets"]["ranking-sentences"]["output"]
    expected = [["a", 'b "c"', "d's"], ["e", "f", "g"]]
    # the prepared file, and the unchanged original
    for source in (path, tmp_path / "rankingsentences_n:32.csv"):
        assert list_table(source)[0]["sentences"][:] == expected
    (tmp_path / "rankingsentences_n:32.csv").write_text("list_sent\n\"[oops, 'b', 'c']\"\n")
    with pytest.raises(ValueError, match=r"csv, line 2: \"\[oops, 'b', 'c'\]\"… is not a list of texts"):
        list_table(tmp_path / "rankingsentences_n:32.csv")


def test_wrong_row_counts_leave_no_output(copies, tmp_path, monkeypatch):
    options = {"copies": str(copies), "output": str(tmp_path / "data")}
    with pytest.raises(
        ValueError, match=r"snli, split train, has 3 rows in .*copies, but the published data has 549367 \(https"
    ):
        rt.prepare(names=["snli"], **options)
    assert not list((tmp_path / "data" / "nli").glob("*.gz"))
    entry = {**public_sets(["snli"])["snli"], "counts": {"train": 3, "dev": 3, "test": 3}}
    monkeypatch.setattr("raoe_train.jobs.prepare.public_sets", lambda names: {"snli": entry})
    assert rt.prepare(names=["snli"], **options)["sets"]["snli"]["rows"]["test"] == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("snly", r"unknown data set 'snly' \(did you mean snli\?\); known sets: raoe, bellm"),
        ("mr", "mr is not on a hub: download SentEval's folder"),
        ("headlines", "download Sarcasm_Headlines_Dataset_v2.json from https.* pass --copies DIR"),
        ("snli", r"snli cannot be read from the hub \(Couldn't reach it\): .*--copies"),
    ],
)
def test_unavailable_sets_are_reported(tmp_path, monkeypatch, name, message):
    def unreachable(*given):
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises((ValueError, OSError), match=message):
        rt.prepare(names=[name], output=str(tmp_path / "data"))


def test_the_table():
    """Every set of a paper has a place, a licence and a page, and counts only splits that are read."""
    sets = public_sets(list(PAPERS))
    assert set(sets) < set(public_sets([*sets, "headlines"]))
    for name, its in sets.items():
        layout = its.get("senteval", {})
        senteval = {*layout.get("files", {}), *layout.get("subsets", {})}
        places = [set(its["hub"]), set(its.get("files", {})), senteval]
        assert any(places) and all(set(its["counts"]) <= place for place in places if place and name != "sts12"), name
        assert its["licence"] and its["page"].startswith("https://")
