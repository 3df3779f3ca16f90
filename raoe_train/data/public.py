"""Public sets by their names: where they come from and how their rows are read, as public.yaml says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raoe_train.config import nearest
from raoe_train.data.columns import NO_GOLD_LABEL, Columns, RowProblem, as_word, parse_score, parse_sentence, parse_word
from raoe_train.data.files import READERS, data_kind
from raoe_train.data.lists import parse_list
from raoe_train.data.senteval import senteval_splits
from raoe_train.data.sources import Source, open_source
from raoe_train.data.tables import Reader, Tally, by_column, each_kept

TABLE = Path(__file__).with_name("public.yaml")
STS = ("sts12", "sts13", "sts14", "sts15", "sts16", "stsb", "sick")
TRANSFER = ("mr", "cr", "subj", "mpqa", "sst2", "trec", "mrpc")
PAPERS = {
    "raoe": ("snli", "mnli", *STS, *TRANSFER),
    "bellm": ("snli", "mnli", *STS, *TRANSFER),
    "ranking": ("snli", "mnli", *STS, *TRANSFER, "ranking-sentences"),
    "margins": ("sst2-phrases", "headlines-split", *TRANSFER),
}
"""What each paper needs, under names of their own. C-STS is given on request and is not here."""


def public_sets(names: list[str]) -> dict[str, dict[str, Any]]:
    """The table's entry of each name, and of each set of a paper's; ValueError for an unknown one."""
    import yaml

    known = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        if name not in known and name not in PAPERS:
            near = nearest(name, [*known, *PAPERS])
            raise ValueError(f"no public set is called {name!r}{near}; there are: {', '.join([*PAPERS, *known])}")
        found.update({each: known[each] for each in PAPERS.get(name, (name,))})
    return found


def find_public(name: str, its: dict[str, Any], copies: Path | None) -> tuple[str, dict[str, Source]]:
    """(where it is, {split: rows}) of a set: the publishers' files below `copies`, SentEval's folders there, the hub's
    folders there (OWNER/NAME or NAME), else the hub; ValueError where there is none."""
    columns = Columns(its.get("named"))
    files = its.get("files", {})
    for folder in [copies, copies / name] if copies else []:
        if files and all((folder / file.partition("#")[0]).is_file() for file in files.values()):
            return str(folder), {split: _file(folder, file, columns) for split, file in files.items()}
    if copies and its["kind"] in ("sts", "transfer") and (splits := senteval_splits(copies, name)):
        return str(copies), splits
    sources, where = {}, "the hub"
    for split, dataset in its["hub"].items():
        path, _, part = dataset.partition("#")
        for folder in [copies / path, copies / path.rpartition("/")[2]] if copies else []:
            if folder.is_dir():
                path, where = str(folder), str(folder)
                break
        sources[split] = open_source(f"hub:{path}#{part}", its.get("named"))
    if not sources:
        wanted = ", ".join(file.partition("#")[0] for file in files.values()) or "a folder of SentEval"
        raise ValueError(f"{name} is on no hub that is known: get {wanted} from {its['page']}, and say --copies DIR")
    return where, sources


def _file(folder: Path, file: str, columns: Columns) -> Source:
    path = folder / file.partition("#")[0]
    if data_kind(path) is None:  # .json, with an object a line
        return Source(str(path), "line", columns, READERS["jsonl"](path))
    return open_source(f"{path}#{file.partition('#')[2]}".rstrip("#"), columns.mapping)


def public_rows(its: dict[str, Any], splits: dict[str, Source], left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of all splits, with our columns and `split` where it has them; `left_out` counts dropped rows."""
    readers: dict[str, Reader] = {"score": parse_score, "label": _label, "subset": parse_word}
    known = {name: readers.get(name, parse_sentence) for name in (*its["columns"], "subset")}
    parse = parse_list if its["kind"] == "lists" else by_column(known, its["columns"])
    for split, source in splits.items():
        tally = Tally("raise")
        for row in each_kept(source, parse, tally):
            yield {"split": split, **row} if split else row
        left_out += tally.dropped


def _label(column: str, value: Any) -> str:
    if (word := as_word(value)) in NO_GOLD_LABEL:
        raise RowProblem(f"{column} is {value!r}", reason="no gold label")
    return word
