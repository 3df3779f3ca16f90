"""Names of sources: a file, a dataset on a hub, a pool of files; and the digest of their content."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raoe_train.config import Choice
from raoe_train.data import sources
from raoe_train.data.pairs import PairsToScore, pair_table, read_pairs
from raoe_train.data.sources import is_file, pool, roles_in
from raoe_train.inputs import recorded
from raoe_train.jobs.settings import TrainConfig
from raoe_train.settings import Data, Input, Pairs
from tests.data.made import HEADER, write
from tests.tiny import training_data


def test_which_names_are_files(tmp_path, monkeypatch):
    assert all(is_file(name) for name in ("a.tsv", "a.jsonl.gz", "a#train", "org/name", "./snli", Path("snli")))
    assert not any(is_file(name) for name in ("snli", "hub:org/name", "hub:org/name#train", "builtin#dev", "builtin"))
    for name in ("nope.tsv", "org/name", "snli#train"):
        with pytest.raises(FileNotFoundError, match=r"no such file: .*hub:OWNER/NAME#SPLIT"):
            read_pairs(name)
    with pytest.raises(ValueError, match="unknown format"):
        read_pairs(write(tmp_path / "a.xml", "x"))
    with pytest.raises(ValueError, match="is a folder, not a data file"):
        read_pairs(tmp_path)
    (tmp_path / "beir").mkdir()
    write(tmp_path / "beir" / "corpus.jsonl.gz", "")
    for name in ("beir", "beir#test"):
        with pytest.raises(ValueError, match=r"is a folder in BEIR's layout: evaluate on it with --tasks retrieval:"):
            read_pairs(str(tmp_path / name))
    hashed = tmp_path / "a#1.tsv"
    write(hashed, HEADER + "a\tb\t1\t0\tx\n")
    assert len(read_pairs(str(hashed))) == 1


def test_large_tables_are_files(tmp_path, monkeypatch):
    """Mapped into memory; their rows are those of a table in memory, also in another process."""
    text = "".join(f"a man {n}\t{'ä' * (n % 5)}b {n}\t{n % 6}\n" for n in range(500))
    path = write(tmp_path / "a.tsv", "sentence1\tsentence2\tscore\n" + text)
    small = read_pairs(path)
    monkeypatch.setattr(sources, "BATCH", 64)
    monkeypatch.setattr(sources, "LARGE", 5_000)
    large = read_pairs(path)
    assert not small.cache_files and len(large.cache_files) == 1
    assert large.features == small.features and large.to_dict() == small.to_dict()
    assert pickle.loads(pickle.dumps(large))[[7, 499]] == small[[7, 499]]
    code = "from raoe_train.data import sources; sources.LARGE = sources.BATCH = 9; import sys; " \
        "print(sources.read_sentences(sys.argv[1], {'sentence': 'sentence1'}).cache_files[0]['filename'])"  # fmt: skip
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert ended.stdout and not os.path.exists(ended.stdout.strip()), ended.stderr


def test_hub_dataset(monkeypatch):
    """A real DatasetDict replaces the download of load_dataset."""
    import datasets

    classes = datasets.ClassLabel(names=["contradiction", "neutral", "entailment"])  # not our order
    features = datasets.Features(
        {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string"), "label": classes}
    )
    rows = {"premise": ["a", "b", "c"], "hypothesis": ["x", "y", "z"], "label": [0, -1, 2]}
    asked = []

    def load_dataset(path, name=None):
        asked.append((path, name))
        return datasets.DatasetDict({split: datasets.Dataset.from_dict(rows, features) for split in ("train", "test")})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data, counts = pair_table("hub:org/nli:v2#train")
    assert asked == [("org/nli", "v2")]
    assert data["label"] == [2, 0]
    assert counts["dropped"] == {"no gold label": 1}
    with pytest.raises(ValueError, match=r"has the splits train, test"):
        read_pairs("nli")


@pytest.fixture
def two_files(tmp_path):
    first = write(tmp_path / "a.tsv", HEADER + "a\tb\t1\tneutral\ttrain\nc\td\t1\tneutral\tdev\n")
    second = write(tmp_path / "b.jsonl", '{"premise": "e", "hypothesis": "f", "score": 2, "label": "entailment"}\n')
    return first, second


def test_a_pool_is_one_source(two_files):
    first, second = two_files
    data, counts = pair_table(f"{first}#train+{second}")
    assert data["sentence1"] == ["a", "e"] and data["label"] == [1, 0] and counts["read"] == 2
    assert read_pairs(f"{second}+builtin#dev", require=["score"])["sentence1"][0] == "e"
    folded = write(
        Path(first).with_name("folded.tsv"), "sentence1\tsentence2\tscore\tlabel\tfold\ng\th\t1\tneutral\tx\n"
    )
    assert read_pairs(f"{folded}#x+builtin#dev", columns={"split": "fold"})["sentence1"][0] == "g"  # raoe's has its own
    assert len(pool(f"{first}#train+{first}#dev")) == 2
    mapped = write(Path(first).with_name("mapped.tsv"), "q\tsentence2\tscore\na\tb\t1\n")
    columns = {"sentence1": "q"}
    assert "sentence1" in roles_in("builtin#dev", columns) and read_pairs("builtin#dev", columns=columns)
    with pytest.raises(ValueError, match=r"builtin#dev, row \d+: no column for sentence1 .looked for q"):
        read_pairs(f"builtin#dev+{mapped}", columns=columns)
    for name in ("one", "hub:a/b#c", first, Path(first)):
        assert pool(name) == [str(name)]


def test_error_in_a_pool_names_the_file(two_files, tmp_path):
    first, second = two_files
    with open(second, "a") as file:
        file.write('{"premise": "g", "hypothesis": "", "score": 1, "label": "neutral"}\n')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: hypothesis is empty"):
        read_pairs(f"{first}+{second}")
    with pytest.raises(ValueError, match=r"a\.tsv: no split 'test'"):
        read_pairs(f"{second}+{first}#test", on_error="skip")
    with pytest.raises(FileNotFoundError, match=r"no such file: .*none\.tsv"):
        read_pairs(f"{first}+{tmp_path}/none.tsv")
    other = write(tmp_path / "c.tsv", "sentence1\tsentence2\tscore\na\tb\t1\n")
    with pytest.raises(ValueError, match=r"c\.tsv, line 2: the row has .* but earlier rows have"):
        read_pairs(f"{first}+{other}")


def test_plus_in_a_file_name(tmp_path):
    own = write(tmp_path / "a+b.tsv", HEADER + "a\tb\t1\tneutral\ttrain\n")
    assert read_pairs(own)["sentence1"] == read_pairs(f"{own}#train")["sentence1"] == ["a"]
    with pytest.raises(FileNotFoundError, match=r"no such file: .*x\+y/z\.tsv"):
        read_pairs(tmp_path / "x+y" / "z.tsv")


def test_file_is_identified_by_its_bytes(two_files):
    first, second = two_files

    def contents(source):
        return recorded(Input(input=str(source)))

    before, old = contents(second), os.stat(second)
    Path(second).write_text(Path(second).read_text().replace("2", "1"))
    os.utime(second, ns=(old.st_atime_ns, old.st_mtime_ns))  # as long and as old as before
    assert contents(second) != before and contents(f"{first}#train") != contents(first)
    assert contents("builtin#train") == {"input": ["builtin#train"]}
    moved = shutil.copy(first, Path(first).with_name("moved.tsv"))
    assert contents(moved) == contents(first) != contents(shutil.copy(first, Path(first).with_name("other.csv")))


def test_a_pool_to_be_scored(two_files):
    table = PairsToScore(Pairs(input="+".join(two_files)), "jsonl", ("score_1",))
    assert table.pairs["sentence1"][:] == ["a", "c", "e"] and table.labels.tolist() == [1, 1, 0]
    assert table.columns == ["sentence1", "sentence2", "score", "label", "split", "premise", "hypothesis"]
    assert [len(row) for row in table.rows()] == [5, 5, 4]
    cells = write(Path(two_files[0]).with_name("c.jsonl"), '{"sentence1": "a", "sentence2": "b", "note": "c\\td"}\n')
    with pytest.raises(ValueError, match=r"c\.jsonl, line 1: a TSV cell cannot store tabs"):  # before hours of scoring
        PairsToScore(Pairs(input=cells), "tsv")


def test_a_pool_to_train_on(two_files):
    first, second = two_files
    loss = Choice("raoe_train.losses.SoftmaxLoss")
    data = Data(train=[f"{first}+{second}", f"{first}#dev"])
    datasets, _ = training_data(TrainConfig(data=data, loss=loss))
    assert list(datasets) == ["a+b", "a#dev"] and datasets["a+b"]["label"][:] == [1, 1, 0]
    different = Data(train=[f"{first}+{second}"], labels={"a": {"neutral": 2}})
    with pytest.raises(ValueError, match=r"data\.labels must be the same for all files in the pool"):
        training_data(TrainConfig(data=different, loss=loss))
