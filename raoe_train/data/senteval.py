"""SentEval's folders (Conneau and Kiela 2018, https://github.com/facebookresearch/SentEval), as its
data/downstream/get_transfer_data.bash leaves them, read as rows with our columns.

Texts are as SentEval hands them to encoders: its tokens, joined by one space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from raoe_train.data.columns import Columns
from raoe_train.data.files import Row, text_lines
from raoe_train.data.sources import Source

ROOTS = ("", "downstream", "data/downstream")
"""Where below the folder of data SentEval's folders may lie."""

# {file: label}; SentEval reads these four sets as latin-1
CLASS_FILES = {
    "mr": ("MR", {"rt-polarity.pos": "1", "rt-polarity.neg": "0"}),
    "cr": ("CR", {"custrev.pos": "1", "custrev.neg": "0"}),
    "subj": ("SUBJ", {"subj.objective": "1", "subj.subjective": "0"}),
    "mpqa": ("MPQA", {"mpqa.pos": "1", "mpqa.neg": "0"}),
}
STS_SUBSETS = {
    "sts12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "sts13": ("FNWN", "headlines", "OnWN"),  # without SMT, whose licence does not allow it
    "sts14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "sts15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}


def senteval_splits(folder: Path, name: str) -> dict[str, list[Source]] | None:
    """{split: its files' rows} of a set in SentEval's layout; {"": …} for sets without splits.

    Rows have sentence1, sentence2 and score (STS12 to 16 also subset), or label and text (MRPC: sentence1 and
    sentence2), and split where there are splits. Sources can be read once.

    Args:
        folder: data.dir; the set's folder is looked up in it, in downstream/ and in data/downstream/.
        name: sts12 to sts16, stsb, sick, mr, cr, subj, mpqa, sst2, trec or mrpc.

    Returns:
        None for another name, or where the set's folder is not there.

    Raises:
        FileNotFoundError: the folder is there, but not every file of it.
    """
    if name in CLASS_FILES:
        place, labels = CLASS_FILES[name]
        splits = {"": {file: _one_class(label) for file, label in labels.items()}}
    elif name in STS_SUBSETS:
        place = f"STS/{name.upper()}-en-test"
        splits = {"test": {f"STS.input.{subset}.txt": _scored(subset) for subset in STS_SUBSETS[name]}}
    elif name in OTHERS:
        place, files, rows = OTHERS[name]
        splits = {split: {file: rows} for split, file in files.items()}
    else:
        return None
    base = next((folder / root / place for root in ROOTS if (folder / root / place).is_dir()), None)
    if base is None:
        return None
    if missing := [file for files in splits.values() for file in files if not (base / file).is_file()]:
        raise FileNotFoundError(f"{base} lacks {', '.join(missing)}, which SentEval's {name} has")
    return {
        split: [_source(base / file, rows, split) for file, rows in files.items()] for split, files in splits.items()
    }


Rows = Callable[[Path], Iterator[Row]]


def _source(path: Path, rows: Rows, split: str) -> Source:
    def with_split() -> Iterator[Row]:
        for line, fields in rows(path):
            yield line, fields if isinstance(fields, str) or not split else {**fields, "split": split}

    return Source(str(path), "line", Columns(), with_split())


def _tokens(text: str) -> str:
    return " ".join(text.split())


def _one_class(label: str) -> Rows:
    def rows(path: Path) -> Iterator[Row]:
        for line, text in text_lines(path, "latin-1"):
            yield line, {"label": label, "text": _tokens(text or "")}

    return rows


def _scored(subset: str) -> Rows:
    def rows(path: Path) -> Iterator[Row]:
        gold = path.with_name(path.name.replace("STS.input.", "STS.gs."))
        scores = [line for _, line in text_lines(gold)]
        texts = list(text_lines(path))
        if len(scores) != len(texts):
            raise ValueError(f"{gold} has {len(scores)} lines, {path.name} {len(texts)}")
        for (line, text), score in zip(texts, scores, strict=True):
            if score == "":  # not part of the set
                continue
            parts = (text or "").split("\t")
            if len(parts) < 2:
                yield line, "not two sentences with a tab between them"
                continue
            yield (
                line,
                {"subset": subset, "score": score, "sentence1": _tokens(parts[0]), "sentence2": _tokens(parts[1])},
            )

    return rows


def _fields(path: Path, places: dict[str, int], header: bool = False) -> Iterator[Row]:
    """Columns of a tab-separated file by their places."""
    for line, text in text_lines(path):
        if header and line == 1:
            continue
        parts = (text or "").split("\t")
        if len(parts) <= max(places.values()):
            yield line, f"{len(parts)} fields, where there should be at least {max(places.values()) + 1}"
            continue
        yield line, {name: _tokens(parts[place]) for name, place in places.items()}


def _sts_benchmark(path: Path) -> Iterator[Row]:
    return _fields(path, {"score": 4, "sentence1": 5, "sentence2": 6})


def _sick(path: Path) -> Iterator[Row]:
    return _fields(path, {"sentence1": 1, "sentence2": 2, "score": 3}, header=True)


def _sst(path: Path) -> Iterator[Row]:
    return _fields(path, {"text": 0, "label": 1})


def _mrpc(path: Path) -> Iterator[Row]:
    return _fields(path, {"label": 0, "sentence1": 3, "sentence2": 4}, header=True)


def _trec(path: Path) -> Iterator[Row]:
    for line, text in text_lines(path, "latin-1"):
        coarse, colon, rest = (text or "").partition(":")
        question = _tokens(rest.partition(" ")[2])
        yield line, {"label": coarse, "text": question} if colon and question else "not CLASS:subclass question"


OTHERS: dict[str, tuple[str, dict[str, str], Rows]] = {
    "stsb": ("STS/STSBenchmark", {split: f"sts-{split}.csv" for split in ("train", "dev", "test")}, _sts_benchmark),
    "sick": (
        "SICK",
        {"train": "SICK_train.txt", "dev": "SICK_trial.txt", "test": "SICK_test_annotated.txt"},
        _sick,
    ),
    "sst2": ("SST/binary", {split: f"sentiment-{split}" for split in ("train", "dev", "test")}, _sst),
    "trec": ("TREC", {"train": "train_5500.label", "test": "TREC_10.label"}, _trec),
    "mrpc": ("MRPC", {"train": "msr_paraphrase_train.txt", "test": "msr_paraphrase_test.txt"}, _mrpc),
}
