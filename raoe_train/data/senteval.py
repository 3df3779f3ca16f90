"""SentEval's folders (Conneau and Kiela 2018, https://github.com/facebookresearch/SentEval), as its
data/downstream/get_transfer_data.bash leaves them, read as rows with our columns.

Texts are as SentEval hands them to encoders: its tokens, joined by one space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from raoe_train.data.columns import Columns, RowProblem
from raoe_train.data.files import Row, text_lines
from raoe_train.data.sources import Source, pooled

ROOTS = ("", "downstream", "data/downstream")
"""Where SentEval's folders may lie below the folder of data."""

STS_SUBSETS = {
    "sts12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "sts13": ("FNWN", "headlines", "OnWN"),  # without SMT, whose licence does not allow it
    "sts14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "sts15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
THREE = ("train", "dev", "test")

Rows = Callable[[Path], Iterator[Row]]


def senteval_splits(folder: Path, name: str) -> dict[str, Source] | None:
    """{split: its rows} of a set in SentEval's layout, with a column split; {"": its rows} of a set without splits;
    None for a set that is not in SETS or has no folder in any of ROOTS below `folder`."""
    place, splits = SETS.get(name, ("", {}))
    base = next((folder / root / place for root in ROOTS if (folder / root / place).is_dir()), None)
    if base is None or not splits:
        return None
    if missing := [file for files in splits.values() for file in files if not (base / file).is_file()]:
        raise FileNotFoundError(f"{base} lacks {', '.join(missing)}, which SentEval's {name} has")

    def rows(split: str, path: Path, read: Rows) -> Iterator[Row]:
        for line, fields in read(path):
            yield line, fields if isinstance(fields, RowProblem) or not split else {**fields, "split": split}

    def source(split: str, files: dict[str, Rows]) -> Source:
        paths = {base / file: read for file, read in files.items()}
        sources = [Source(str(path), "line", Columns(), rows(split, path, read)) for path, read in paths.items()]
        return pooled(str(base), sources, Columns())

    return {split: source(split, files) for split, files in splits.items()}


def _tokens(text: str) -> str:
    return " ".join(text.split())


def _of_class(path: Path, label: str) -> Iterator[Row]:
    """A file of sentences of one class."""
    for line, text in text_lines(path, "latin-1"):  # as SentEval reads these sets
        yield line, {"label": label, "text": _tokens(text or "")}


def _fields(path: Path, header: bool = False, **places: int) -> Iterator[Row]:
    """A tab-separated file: its columns by their places."""
    least = max(places.values()) + 1
    for line, text in text_lines(path):
        parts = (text or "").split("\t")
        if line <= header:
            continue
        if len(parts) >= least:
            yield line, {name: _tokens(parts[place]) for name, place in places.items()}
        else:
            yield line, RowProblem(f"{len(parts)} fields, where there should be at least {least}")


def _scored(path: Path, subset: str) -> Iterator[Row]:
    """A file of pairs, whose scores are in a file beside it."""
    gold = path.with_name(path.name.replace("STS.input.", "STS.gs."))
    scores = [line for _, line in text_lines(gold)]
    texts = list(text_lines(path))
    if len(scores) != len(texts):
        raise ValueError(f"{gold} has {len(scores)} lines, {path.name} {len(texts)}")
    for (line, text), score in zip(texts, scores, strict=True):
        if score == "":  # not part of the set
            continue
        first, tab, rest = (text or "").partition("\t")
        second = rest.partition("\t")[0]
        fields = {"subset": subset, "score": score, "sentence1": _tokens(first), "sentence2": _tokens(second)}
        yield line, fields if tab else RowProblem("not two sentences with a tab between them")


def _questions(path: Path) -> Iterator[Row]:
    for line, text in text_lines(path, "latin-1"):
        coarse, colon, rest = (text or "").partition(":")
        question = _tokens(rest.partition(" ")[2])
        good = colon and question
        yield line, {"label": coarse, "text": question} if good else RowProblem("not CLASS:subclass question")


def _classes(positive: str, negative: str) -> dict[str, dict[str, Rows]]:
    return {"": {positive: partial(_of_class, label="1"), negative: partial(_of_class, label="0")}}


def _sts(name: str) -> dict[str, dict[str, Rows]]:
    return {"test": {f"STS.input.{subset}.txt": partial(_scored, subset=subset) for subset in STS_SUBSETS[name]}}


STSB = partial(_fields, score=4, sentence1=5, sentence2=6)
SICK_FILES = {"train": "train", "dev": "trial", "test": "test_annotated"}
SICK = partial(_fields, header=True, sentence1=1, sentence2=2, score=3)
SST = partial(_fields, text=0, label=1)
MRPC = partial(_fields, header=True, label=0, sentence1=3, sentence2=4)

SETS: dict[str, tuple[str, dict[str, dict[str, Rows]]]] = {
    "mr": ("MR", _classes("rt-polarity.pos", "rt-polarity.neg")),
    "cr": ("CR", _classes("custrev.pos", "custrev.neg")),
    "subj": ("SUBJ", _classes("subj.objective", "subj.subjective")),
    "mpqa": ("MPQA", _classes("mpqa.pos", "mpqa.neg")),
    "stsb": ("STS/STSBenchmark", {split: {f"sts-{split}.csv": STSB} for split in THREE}),
    "sick": ("SICK", {split: {f"SICK_{file}.txt": SICK} for split, file in SICK_FILES.items()}),
    "sst2": ("SST/binary", {split: {f"sentiment-{split}": SST} for split in THREE}),
    "trec": ("TREC", {"train": {"train_5500.label": _questions}, "test": {"TREC_10.label": _questions}}),
    "mrpc": ("MRPC", {split: {f"msr_paraphrase_{split}.txt": MRPC} for split in ("train", "test")}),
    **{name: (f"STS/{name.upper()}-en-test", _sts(name)) for name in STS_SUBSETS},
}
"""{set: (folder, {split: {file: how its rows are read}})}"""
