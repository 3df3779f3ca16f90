"""Everything that the studies use of raoe_train. No other file here imports it, so a change there is adapted here.

Public are `rt.run`, `rt.load_encoder` and `rt.read_pairs`. The other names are not: the configuration's parser
and check, readers of lists and sentences, examples and tasks of `evaluate`, Markdown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel

import raoe_train as rt
from raoe_train.cli import job_of
from raoe_train.config import checked, merge
from raoe_train.data.pairs import conditional_table, pair_table
from raoe_train.data.rows import list_table
from raoe_train.data.sources import read_sentences
from raoe_train.evaluation.sts import conditional_prompt
from raoe_train.evaluation.tasks import EXAMPLES, Outcomes, main_score, read_tasks, split_word
from raoe_train.jobs.train import check_config
from raoe_train.losses.base import CachedLoss
from raoe_train.losses.collators import LISTS, Reads, TextCollator
from raoe_train.losses.gist import teacher_embeddings
from raoe_train.losses.listmle import ListMLELoss
from raoe_train.outputs import beside, digest
from raoe_train.training.certificate import LEVEL, differences, interval, resample
from raoe_train.training.reads import table_of
from raoe_train.training.run_directory import cell

__all__ = ["LEVEL", "LISTS", "PAIRS_WITH_TEXTS", "CachedLoss", "ListMLELoss", "Outcomes", "cell", "differences",
           "interval", "main_score", "read_tasks", "resample", "split_word", "teacher_embeddings"]  # fmt: skip


def pairs(source: str, data: Any, prompt: str | None, with_label: bool) -> Any:
    return table_of(source, data, pair_table, "score", "label", names=["sentence1", "sentence2"])


PAIRS_WITH_TEXTS = Reads("pairs", f"{__name__}:pairs", TextCollator)


def run(job: str, recipe: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job of raoe-train and return its result."""
    return rt.run(job, recipe, **overrides)


def run_alone(job: str, recipe: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Run a job in a new process, so that its peak memory is its own. Its errors are raised here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run, job, recipe, dict(overrides)).result()


def check(job: str, recipe: str | None, overrides: Mapping[str, Any]) -> None:
    """Raise ValueError if the job does not accept this configuration. Nothing is run."""
    config = checked(merge(job_of(job).config, [recipe, overrides]))  # type: ignore[attr-defined]
    if job == "train":
        check_config(config)


def check_tasks(tasks: Sequence[str], data_dir: str | None) -> None:
    """Raise ValueError or FileNotFoundError if a task of `evaluate` has no data."""
    if tasks:
        read_tasks(tasks, data_dir)


def load_encoder(name: str, **settings: Any) -> Any:
    """Load a SentenceTransformer."""
    return rt.load_encoder(name, **settings)


def draw_weights(name: str, seed: int, folder: Path) -> Path:
    """Save an encoder with the architecture and the tokenizer of another one, but random weights. Return the folder."""
    model = rt.load_encoder(name, device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = AutoModel.from_config(model[0].model.config)
    # strict=False, because the new model may have a pooler that the saved encoder lacks
    if missing := model[0].model.load_state_dict(new.state_dict(), strict=False).missing_keys:
        raise ValueError(f"weights of {name} cannot be drawn: {', '.join(missing[:3])}")
    model.save_pretrained(str(folder))
    return folder


def conditional_rows(source: str, encoder: Any) -> tuple[list[str], list[str]]:
    """Read the two texts of each C-STS row with its condition, by the prompt of a SentenceTransformer."""
    if (prompt := conditional_prompt(encoder)) is None:
        raise ValueError("the encoder has no prompt with {condition}: train with one, or set --model.prompt")
    rows = conditional_table(source, prompt, scored=False)[0]
    return rows["sentence1"][:], rows["sentence2"][:]


def read_lists(path: str, on_error: str) -> list[list[str]]:
    """Read the lists of sentences that `generate` wrote."""
    return list_table(path, on_error=on_error)[0]["sentences"][:]


def read_texts(source: str) -> Iterable[str]:
    """Read the lines of a .txt file, or the sentences of a source of pairs."""
    if source.endswith(".txt"):
        return read_sentences(source)["sentence"][:]
    pairs = rt.read_pairs(source, columns={"score": None, "label": None})
    return [text for name in ("sentence1", "sentence2") for text in pairs.unique(name)]


def read_outcomes(result: Path, settings: Mapping[str, Any]) -> dict[str, Outcomes]:
    """The outcomes that `evaluate` saved beside a result; {} if there are none or the settings differ."""
    path = beside(result, EXAMPLES)
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            kept = dict(arrays)
        of_tasks = [array for name, array in kept.items() if "\t" in name]
        if any(array.ndim != 1 or array.dtype != float or not array.size for array in of_tasks):
            raise ValueError("an array is no list of numbers")
    except Exception as error:  # zipfile's, zlib's or NumPy's
        raise ValueError(f"{path} cannot be read as the examples of a result: {error}") from None
    if str(kept.get("made_from")) != digest(settings):
        return {}
    words = [name.removesuffix("\tvalues") for name in kept if name.endswith("\tvalues")]
    return {word: Outcomes(kept[f"{word}\tvalues"], kept.get(f"{word}\tgold")) for word in words}
