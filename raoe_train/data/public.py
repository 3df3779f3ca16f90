"""Find and read the public data sets that public.yaml lists. SentEval's folders (Conneau and Kiela 2018) must have the
layout that the script data/downstream/get_transfer_data.bash of https://github.com/facebookresearch/SentEval
creates."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import yaml

from raoe_train.config import nearest
from raoe_train.data.columns import NO_GOLD_LABEL, RowProblem, Rows, as_word, parse_score, parse_sentence, parse_word
from raoe_train.data.files import json_rows, text_lines
from raoe_train.data.rows import read_list
from raoe_train.data.sources import Source

Splits = dict[str, Rows | str]  # {split: its rows, or the source to read}; a set without splits has the key ""
ROOTS = ("", "downstream", "data/downstream")  # where SentEval's folders may be, below `copies`
STS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick")
TRANSFER = ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")
PAPERS = {
    "raoe": ("snli", "mnli", *STS, *TRANSFER),
    "bellm": ("snli", "mnli", *STS, *TRANSFER),
    "ranking": ("snli", "mnli", *STS, *TRANSFER, "ranking-sentences"),
    "margins": ("sst2-phrases", "headlines-split", *TRANSFER),
}  # without C-STS, which is available only on request


def public_sets(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return {data set: its entry in public.yaml}. `names` contains names of data sets and papers. A paper selects all
    data sets that it uses."""
    catalog = yaml.safe_load(Path(__file__).with_name("public.yaml").read_text(encoding="utf-8"))
    entries: dict[str, dict[str, Any]] = {}
    for name in names:
        if name not in catalog and name not in PAPERS:
            hint = nearest(name, [*catalog, *PAPERS])
            known = ", ".join([*PAPERS, *catalog])
            raise ValueError(f"unknown data set {name!r}{hint}; known sets: {known}")
        entries.update({each: catalog[each] for each in PAPERS.get(name, (name,))})
    return entries


def find_public(name: str, entry: dict[str, Any], copies: Path | None) -> tuple[str, Splits]:
    """Find a public data set. Return (its location, its splits). The folder `copies` is searched for the publishers'
    files, then for SentEval's folders, then for clones of hub repositories (OWNER/NAME or NAME). If `copies` does not
    contain the data set, it is read from the hub. Raise ValueError if no location contains the data set."""
    files = entry.get("files", {})
    for folder in [copies, copies / name] if copies else []:
        if files and all((folder / file.partition("#")[0]).is_file() for file in files.values()):
            return str(folder), {split: _file(folder / file) for split, file in files.items()}
    if copies and "senteval" in entry and (splits := senteval_splits(copies, entry["senteval"])):
        return str(copies), splits
    sources, place = Splits(), "the hub"
    for split, dataset in entry["hub"].items():
        path, _, part = dataset.partition("#")
        for folder in [copies / path, copies / path.rpartition("/")[2]] if copies else []:
            if folder.is_dir():
                path = place = str(folder)
                break
        sources[split] = f"hub:{path}#{part}"
    if not sources:
        parts = ", ".join(file.partition("#")[0] for file in files.values()) or "SentEval's folder"
        advice = f"download {parts} from {entry['page']} to a folder DIR, and pass --copies DIR"
        raise ValueError(f"{name} is not on a hub: {advice}")
    return place, sources


def _file(path: Path) -> Rows | str:
    # .json files have one JSON object per line, like .jsonl
    return json_rows(path, f"{path}, line") if path.suffix == ".json" else str(path)


def senteval_splits(folder: Path, layout: dict[str, Any]) -> Splits | None:
    """Return {split: rows} of a data set in SentEval's layout (see public.yaml), or None if `folder` and its subfolders
    in ROOTS do not contain the data set."""
    bases = [folder / root / layout["folder"] for root in ROOTS]
    base = next((each for each in bases if each.is_dir()), None)
    if base is None:
        return None
    files = dict(layout.get("files", {}))
    for split, subsets in layout.get("subsets", {}).items():
        files[split] = [f"STS.input.{subset}.txt" for subset in subsets]
    if missing := [n for names in files.values() for n in names if not (base / n).is_file()]:
        raise FileNotFoundError(f"these SentEval files are missing from {base}: {', '.join(missing)}")
    splits = Splits()
    for split, names in files.items():
        labels = layout.get("labels", [None] * len(names))
        splits[split] = chain.from_iterable(
            _rows(base / name, layout, label) for name, label in zip(names, labels, strict=True)
        )
    return splits


def _rows(path: Path, layout: dict[str, Any], label: str | None) -> Rows:
    """Read a SentEval file. The scores of STS pairs are read from a separate file."""
    lines, scores = [*text_lines(path, layout.get("encoding", "utf-8"))], list[Any]()
    subset = path.name.removeprefix("STS.input.").removesuffix(".txt")
    if "subsets" in layout:
        gold = path.with_name(f"STS.gs.{subset}.txt")
        scores = [score for _, score in text_lines(gold)]
        if len(scores) != len(lines):
            problem = f"has {len(scores)} lines, but {path.name} has {len(lines)}"
            raise ValueError(f"{gold} {problem}")
    for (number, text), score in zip_longest(lines[layout.get("header", 0) :], scores):
        if score == "":  # pairs without a score are not part of the set
            continue
        found = re.match(layout["line"], text or "")
        if not found:
            columns = ", ".join(re.compile(layout["line"]).groupindex)
            yield f"{path}, line {number}", RowProblem(f"the line does not have the columns {columns}")
            continue
        # SentEval joins tokens with single spaces
        fields = {name: " ".join(value.split()) for name, value in found.groupdict().items()}
        if scores:
            fields |= {"score": score, "subset": subset}
        if label:
            fields["label"] = label
        yield f"{path}, line {number}", fields


def public_rows(entry: dict[str, Any], splits: Splits, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of all splits, with raoe's column names and, if the split has a name, a column split. Count
    dropped rows in `left_out`."""
    known: dict[str, Callable[[str, Any], Any]] = {"score": parse_score, "label": _label, "subset": parse_word}
    readers = {name: known.get(name, parse_sentence) for name in (*entry["columns"], "subset")}

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        if entry["kind"] == "lists":
            return read_list(row)
        found = opened.columns.find(row, entry["columns"], readers)
        return {name: read(found[name], row[found[name]]) for name, read in readers.items() if name in found}

    for split, rows in splits.items():
        opened = Source(rows, entry.get("named"))
        for values in opened.parse(parse):
            yield {"split": split, **values} if split else values
        left_out += opened.dropped


def _label(column: str, value: Any) -> str:
    if (word := as_word(value)) in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}: the row has no gold label", reason="no gold label")
    return word
