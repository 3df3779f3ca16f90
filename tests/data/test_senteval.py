"""SentEval's folders as its download script writes them."""

import gzip
import json

import pytest

from raoe_train import run
from raoe_train.data.public import public_sets, senteval_splits
from raoe_train.evaluation.tasks import read_tasks

SUBSETS = ("FNWN", "headlines", "OnWN")
LINE = "the line does not have the columns"
BAD = {
    "STS/STS13-en-test/STS.input.OnWN.txt": (b"a\tb\nc\td\none text\n", f"line 3: {LINE} sentence1, sentence2"),
    "STS/STS13-en-test/STS.gs.FNWN.txt": (b"1\n2\n3\n4\n", r"FNWN\.txt has 4 lines, but STS\.input\.FNWN\.txt has 3"),
    "STS/STSBenchmark/sts-test.csv": (b"g\tf\ty\tid\t1.0\tone text\n", f"line 1: {LINE} score, sentence1"),
    "SICK/SICK_test_annotated.txt": (b"pair_ID\ta\tb\ts\te\n1\ta b\tc d\tx\tNEUTRAL\n", "line 2: score is 'x'"),
    "SST/binary/sentiment-dev": (b"no label\n", f"sentiment-dev, line 1: {LINE} text, label"),
    "TREC/TREC_10.label": (b"DESC What ?\n", f"line 1: {LINE} label, text"),
    "MRPC/msr_paraphrase_test.txt": (b"head\n1\t2\n", f"line 2: {LINE} label, sentence1"),
    "MR/rt-polarity.neg": (b"good\n\n", r"rt-polarity\.neg, line 2: text is empty"),
}


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def lines(text, count=12):
    return "".join(text.format(number) + "\n" for number in range(count)).encode()


@pytest.fixture(params=["", "data/downstream"])
def folder(tmp_path, request):
    root = tmp_path / request.param
    write(
        root,
        {
            # latin-1, and two spaces between tokens
            "MR/rt-polarity.pos": b"caf\xe9 \x85  good\n" + lines("good {}", 11),
            "MR/rt-polarity.neg": lines("bad {}"),
            "CR/custrev.pos": lines("fine {}"), "CR/custrev.neg": lines("broken {}"),
            "SUBJ/subj.objective": lines("a train left at {}"), "SUBJ/subj.subjective": lines("a fine journey {}"),
            "MPQA/mpqa.pos": lines("praised {}"), "MPQA/mpqa.neg": lines("blamed {}"),
            **{f"SST/binary/sentiment-{split}": f"a {split} film\t1\nno {split} film\t0\n".encode()
               for split in ("train", "dev", "test")},
            "TREC/train_5500.label": lines("DESC:manner How {} ?") + lines("NUM:date When {} ?"),
            "TREC/TREC_10.label": b"NUM:dist How far is it from Denver to Aspen ?\n",
            "MRPC/msr_paraphrase_train.txt": b"\xef\xbb\xbfQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
            + lines("1\t1\t2\ta {}\tb \"quoted\n") .replace(b"\n\n", b"\n") + lines("0\t1\t2\tc {}\td"),
            "MRPC/msr_paraphrase_test.txt": b"Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\tx\ty\n",
            "SICK/SICK_train.txt": b"pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
            b"1\ta b\tc d\t2.5\tNEUTRAL\n",
            "SICK/SICK_trial.txt": b"pair_ID\tA\tB\tscore\tlabel\n2\te\tf\t1.5\tNEUTRAL\n3\tg\th\t4\tENTAILMENT\n",
            "SICK/SICK_test_annotated.txt": b"pair_ID\tA\tB\tscore\tlabel\n4\ti\tj\t1\tNEUTRAL\n5\tk\tl\t5\tE\n",
            **{f"STS/STSBenchmark/sts-{split}.csv": f'g\tf\ty\t1\t1.0\t{split} "a\tb\ng\tf\ty\t2\t3.0\tc\td\n'.encode()
               for split in ("train", "dev", "test")},
            **{f"STS/STS13-en-test/STS.input.{subset}.txt": f"{subset} a\tb  c\nd\te\nf\tg\twhence\n".encode()
               for subset in SUBSETS},
            # a pair without a score is no part of the set
            **{f"STS/STS13-en-test/STS.gs.{subset}.txt": b"1.5\n\n4\n" for subset in SUBSETS},
        },
    )  # fmt: skip
    return tmp_path


def read(tasks, folder):
    """Tasks of the sets as `prepare` writes them."""
    names = {task.partition(":")[2] or task for task in tasks}
    names = sorted({name.partition("#")[0].removesuffix("-all").lower() for name in names})
    run("prepare", names=names, copies=str(folder), counts=False, output=str(folder / "made"))
    return read_tasks(tasks, folder / "made")


def columns(task):
    """What a transfer task holds, by name."""
    return dict(zip(("text", "second", "label", "split"), task.score.keywords["data"], strict=True))


def scored(task):
    """First sentences, second sentences and scores of an sts task."""
    half = len(task.sentences) // 2
    return task.sentences[:half], task.sentences[half:], list(task.score.keywords["scores"])


def test_two_classes(folder):
    tasks = read(["mr", "CR", "transfer:SUBJ", "mpqa"], folder)
    data = columns(tasks["mr"])
    assert data["text"][:2] == ["café good", "good 0"] and data["text"][12] == "bad 0"
    assert data["label"] == ["1"] * 12 + ["0"] * 12 and set(data["split"]) == {""}
    # SentEval's senteval/binary.py takes the objective ones as its positives
    subj = columns(tasks["transfer:SUBJ"])
    assert (subj["text"][0], subj["label"][0]) == ("a train left at 0", "1")
    assert (columns(tasks["CR"])["text"][0], columns(tasks["mpqa"])["text"][0]) == ("fine 0", "praised 0")


def test_sets_with_splits(folder):
    tasks = read(["sst2", "trec", "mrpc"], folder)
    assert columns(tasks["sst2"])["split"] == ["train", "train", "dev", "dev", "test", "test"]
    assert columns(tasks["sst2"])["text"][:2] == ["a train film", "no train film"]
    assert columns(tasks["sst2"])["label"] == ["1", "0"] * 3
    trec = columns(tasks["trec"])
    last = {"text": "How far is it from Denver to Aspen ?", "label": "NUM", "split": "test"}
    assert {name: column[-1] for name, column in trec.items() if column} == last
    mrpc = columns(tasks["mrpc"])
    assert (mrpc["text"][0], mrpc["second"][0], mrpc["label"][0]) == ("a 0", 'b "quoted', "1")
    assert len(mrpc["text"]) == 25 and mrpc["split"].count("test") == 1


def test_sts(folder):
    # as SentEval's sts.py has them, but for SMT
    sets = [public_sets([f"sts{year}"])[f"sts{year}"]["senteval"] for year in range(12, 17)]
    assert [len(each["subsets"]["test"]) for each in sets] == [5, 3, 6, 5, 5]
    tasks = read(["sts13", "stsb", "stsb#dev", "sick", "sick-all"], folder)
    first, second, scores = scored(tasks["sts13"])
    assert first == ["FNWN a", "f", "headlines a", "f", "OnWN a", "f"] and second[:2] == ["b c", "g"]
    subsets = [*tasks["sts13"].score.keywords["subsets"]]
    assert scores == [1.5, 4.0] * 3 and subsets == ["FNWN"] * 2 + ["headlines"] * 2 + ["OnWN"] * 2
    first, _, scores = scored(tasks["stsb"])
    assert first == ['test "a', "c"] and scores == [1.0, 3.0]
    assert scored(tasks["stsb#dev"])[0] == ['dev "a', "c"]
    assert scored(tasks["sick"]) == (["i", "k"], ["j", "l"], [1.0, 5.0])
    assert scored(tasks["sick-all"])[2] == [2.5, 1.5, 4.0, 1.0, 5.0]
    with gzip.open(folder / "made" / "sts" / "sick.jsonl.gz", "rt") as lines:  # RAOE's gate reads the labels
        assert [json.loads(line)["label"] for line in lines][1:3] == ["NEUTRAL", "ENTAILMENT"]


@pytest.mark.parametrize("file", BAD)
def test_malformed_lines_are_named(folder, file):
    content, message = BAD[file]
    root = next(path for path in (folder, folder / "downstream", folder / "data/downstream") if (path / "MR").is_dir())
    write(root, {file: content})
    name = {"STS": "sts13", "SICK": "sick", "SST": "sst2"}.get(file.split("/")[0], file.split("/")[0].lower())
    with pytest.raises(ValueError, match=message):
        read(["stsb" if "STSBenchmark" in file else name], folder)


def test_missing_package_or_file(folder, tmp_path):
    (next(folder.rglob("custrev.neg"))).unlink()
    with pytest.raises(FileNotFoundError, match=r"SentEval files are missing from .*CR: custrev\.neg"):
        read(["cr"], folder)
    with pytest.raises(ValueError, match="no split 'validation'; splits: train"):
        read(["stsb#validation"], folder)
    assert senteval_splits(tmp_path / "nowhere", public_sets(["mr"])["mr"]["senteval"]) is None
