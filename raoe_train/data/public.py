"""Find and read the public data sets of public.yaml. SentEval's folders (Conneau and Kiela 2018) must be as
data/downstream/get_transfer_data.bash of https://github.com/facebookresearch/SentEval writes them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from raoe_train.config import nearest
from raoe_train.data.columns import NO_GOLD_LABEL, Columns, RowProblem, as_word, parse_score, parse_sentence, parse_word
from raoe_train.data.files import Block, blocks_of, json_rows, text_lines
from raoe_train.data.rows import read_lists
from raoe_train.data.sources import open_source
from raoe_train.data.tables import Reader, Reading, Values, read_columns

STS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick")
TRANSFER = ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")
PAPERS = {
    "raoe": ("snli", "mnli", *STS, *TRANSFER),
    "bellm": ("snli", "mnli", *STS, *TRANSFER),
    "ranking": ("snli", "mnli", *STS, *TRANSFER, "ranking-sentences"),
    "margins": ("sst2-phrases", "headlines-split", *TRANSFER),
}  # without C-STS, which is available on request only


def public_sets(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return {set: its entry in public.yaml} for names of sets, and for all sets of a named paper."""
    catalog = yaml.safe_load(Path(__file__).with_name("public.yaml").read_text(encoding="utf-8"))
    entries: dict[str, dict[str, Any]] = {}
    for name in names:
        if name not in catalog and name not in PAPERS:
            hint = nearest(name, [*catalog, *PAPERS])
            raise ValueError(f"unknown public set {name!r}{hint}; known sets: {', '.join([*PAPERS, *catalog])}")
        entries.update({each: catalog[each] for each in PAPERS.get(name, (name,))})
    return entries


def find_public(name: str, entry: dict[str, Any], copies: Path | None) -> tuple[str, dict[str, Iterator[Block]]]:
    """Find a set and return (its location, {split: rows}). Locations are tried in this order: the publishers' files,
    SentEval's folders and clones of hub repositories (OWNER/NAME or NAME), all below `copies`, then the hub. ValueError
    if no location has the set."""
    columns, files = entry.get("named"), entry.get("files", {})
    for folder in [copies, copies / name] if copies else []:
        if files and all((folder / file.partition("#")[0]).is_file() for file in files.values()):
            return str(folder), {split: _open(folder / file, columns) for split, file in files.items()}
    if copies and entry["kind"] in ("sts", "transfer") and (splits := senteval_splits(copies, name)):
        return str(copies), splits
    sources, place = {}, "the hub"
    for split, dataset in entry["hub"].items():
        path, _, part = dataset.partition("#")
        for folder in [copies / path, copies / path.rpartition("/")[2]] if copies else []:
            if folder.is_dir():
                path, place = str(folder), str(folder)
                break
        sources[split] = open_source(f"hub:{path}#{part}", columns)
    if not sources:
        parts = ", ".join(file.partition("#")[0] for file in files.values()) or "SentEval's folder"
        raise ValueError(f"{name} is not on a hub: download {parts} from {entry['page']} to DIR and use --copies DIR")
    return place, sources


def _open(path: Path, columns: Mapping[str, str] | None) -> Iterator[Block]:
    if path.suffix == ".json":  # these files have one JSON object per line, like .jsonl
        return blocks_of(str(path), "line", json_rows(path))
    return open_source(str(path), columns)


def public_rows(
    entry: dict[str, Any], splits: dict[str, Iterator[Block]], left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of all splits, with raoe's column names and the split's name, if any. Count
    dropped rows."""
    known: dict[str, Reader] = {"score": parse_score, "label": _label, "subset": parse_word}
    readers = {name: known.get(name, parse_sentence) for name in (*entry["columns"], "subset")}

    def parse(block: Block, columns: Columns) -> Values:
        return read_columns(block, columns.find(block.cells, entry["columns"], readers), readers)

    for split, blocks in splits.items():
        reading = Reading(blocks, entry.get("named"))
        for part in reading.parts(read_lists if entry["kind"] == "lists" else parse):
            for values in zip(*part.values(), strict=True):
                row = dict(zip(part, values, strict=True))
                yield {"split": split, **row} if split else row
        left_out += reading.dropped


def _label(column: str, value: Any) -> str:
    if (word := as_word(value)) in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}", reason="no gold label")
    return word


ROOTS = ("", "downstream", "data/downstream")  # possible locations of SentEval's folders below `copies`
STS_SUBSETS = {
    "sts12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "sts13": ("FNWN", "headlines", "OnWN"),  # without SMT, whose licence does not allow distribution
    "sts14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "sts15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
Rows = Iterator[tuple[int, dict[str, Any] | RowProblem]]
Read = Callable[[Path], Rows]


def senteval_splits(folder: Path, name: str) -> dict[str, Iterator[Block]] | None:
    """Return {split: its rows} of a set in SentEval's layout, or {"": rows} if it has no splits. Return
    None if the set is not in SETS, or has no folder in any of ROOTS below `folder`."""
    place, splits = SETS.get(name, ("", {}))
    base = next((folder / root / place for root in ROOTS if (folder / root / place).is_dir()), None)
    if base is None or not splits:
        return None
    missing = [file for files in splits.values() for file in files if not (base / file).is_file()]
    if missing:
        raise FileNotFoundError(f"SentEval's {name} in {base} is incomplete: {', '.join(missing)} missing")
    blocks = dict[str, Iterator[Block]]()
    for split, files in splits.items():
        paths = [(base / file, read) for file, read in files.items()]
        blocks[split] = chain(*(blocks_of(str(path), "line", read(path)) for path, read in paths))
    return blocks


def _tokens(text: str) -> str:
    """Join a text's tokens with single spaces, as SentEval does."""
    return " ".join(text.split())


def _class_rows(path: Path, label: str) -> Rows:
    for line, text in text_lines(path, "latin-1"):  # the encoding with which SentEval reads these sets
        yield line, {"label": label, "text": _tokens(text or "")}


def _fields(path: Path, header: bool = False, **places: int) -> Rows:
    """Read a tab-separated file. `places` is {raoe's column: index of the field in a line, from 0}."""
    least = max(places.values()) + 1
    for line, text in text_lines(path):
        parts = (text or "").split("\t")
        if line <= header:
            continue
        if len(parts) >= least:
            yield line, {name: _tokens(parts[place]) for name, place in places.items()}
        else:
            yield line, RowProblem(f"{len(parts)} fields, but at least {least} are needed")


def _scored_pairs(path: Path) -> Rows:
    """Read a file of pairs whose scores are in another file of the same folder."""
    subset = path.name.removeprefix("STS.input.").removesuffix(".txt")
    gold = path.with_name(path.name.replace("STS.input.", "STS.gs."))
    scores = [line for _, line in text_lines(gold)]
    texts = list(text_lines(path))
    if len(scores) != len(texts):
        raise ValueError(f"{gold} has {len(scores)} lines, but {path.name} has {len(texts)}")
    for (line, text), score in zip(texts, scores, strict=True):
        if score == "":  # pairs without a score are not part of the set
            continue
        first, tab, rest = (text or "").partition("\t")
        second = rest.partition("\t")[0]
        fields = {"subset": subset, "score": score, "sentence1": _tokens(first), "sentence2": _tokens(second)}
        yield line, fields if tab else RowProblem("not two sentences with a tab between them")


def _questions(path: Path) -> Rows:
    for line, text in text_lines(path, "latin-1"):
        coarse, colon, rest = (text or "").partition(":")
        fields = {"label": coarse, "text": _tokens(rest.partition(" ")[2])}
        yield (line, fields if colon and fields["text"] else RowProblem("not CLASS:subclass question"))


def _classes(positive: str, negative: str) -> dict[str, dict[str, Read]]:
    return {"": {positive: partial(_class_rows, label="1"), negative: partial(_class_rows, label="0")}}


STSB = partial(_fields, score=4, sentence1=5, sentence2=6)
SICK_FILES = {"train": "train", "dev": "trial", "test": "test_annotated"}
SICK = partial(_fields, header=True, sentence1=1, sentence2=2, score=3, label=4)
SST = partial(_fields, text=0, label=1)
MRPC = partial(_fields, header=True, label=0, sentence1=3, sentence2=4)

SETS: dict[str, tuple[str, dict[str, dict[str, Read]]]] = {
    "mr": ("MR", _classes("rt-polarity.pos", "rt-polarity.neg")),
    "cr": ("CR", _classes("custrev.pos", "custrev.neg")),
    "subj": ("SUBJ", _classes("subj.objective", "subj.subjective")),
    "mpqa": ("MPQA", _classes("mpqa.pos", "mpqa.neg")),
    "stsb": ("STS/STSBenchmark", {split: {f"sts-{split}.csv": STSB} for split in ("train", "dev", "test")}),
    "sick": ("SICK", {split: {f"SICK_{file}.txt": SICK} for split, file in SICK_FILES.items()}),
    "sst2": ("SST/binary", {split: {f"sentiment-{split}": SST} for split in ("train", "dev", "test")}),
    "trec": ("TREC", {"train": {"train_5500.label": _questions}, "test": {"TREC_10.label": _questions}}),
    "mrpc": ("MRPC", {split: {f"msr_paraphrase_{split}.txt": MRPC} for split in ("train", "test")}),
    **{
        name: (f"STS/{name.upper()}-en-test", {"test": {f"STS.input.{file}.txt": _scored_pairs for file in files}})
        for name, files in STS_SUBSETS.items()
    },
}
"""{set: (folder, {split: {file: reader of its rows}})}"""
