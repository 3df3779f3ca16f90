"""The directory of a training run: its settings, checkpoints, final model and model card."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from raoe_train.config import marked
from raoe_train.encoders.scratch import drop_head
from raoe_train.inputs import recorded
from raoe_train.outputs import Output, partial, read_json, remove, replacing_model, set_modes
from raoe_train.processes import on_rank_zero
from raoe_train.settings import SCRATCH, Model
from raoe_train.training.certificate import CERTIFICATE, table_of
from raoe_train.training.measures import score_rows
from raoe_train.training.report import cell, made_with, table

RECIPE, METRICS, LOG = "recipe.yaml", "metrics.json", "log.jsonl"
CHECKPOINTS, INITIAL, TEACHER = "checkpoints", "initial", "teacher"  # folders of an unfinished run
EVENTS, PICTURE = "tensorboard", "run.png"
FILES = (RECIPE, METRICS, LOG, CERTIFICATE, PICTURE, CHECKPOINTS, INITIAL, TEACHER, EVENTS)
STATE = "trainer_state.json"  # file in each checkpoint
HEADING = "\n## Model Details\n"  # raoe's section is inserted before this heading of sentence-transformers' card


def starting_encoder(model: Model, initial: Path, texts: Iterable[str], seed: int) -> Any:
    """Load the encoder to train. A new encoder is saved in `initial`, from where a resumed run loads it."""
    from raoe_train.encoders.load import load_encoder

    if model.name != SCRATCH:
        return load_encoder(model, sentences=texts, seed=seed, train=True)
    new: list[Any] = []

    def make() -> None:
        if initial.is_dir():
            return
        new.append(load_encoder(model, sentences=texts, seed=seed, train=True))
        remove(whole := partial(initial))  # a killed process may have left it
        new[0].save_pretrained(str(whole), create_model_card=False)
        set_modes(whole)
        whole.replace(initial)  # atomically, because half of a tokenizer would load as another tokenizer

    # only rank 0 creates the encoder, because transformers saves files only on rank 0 of a process group
    on_rank_zero(make)
    return new[0] if new else load_encoder(replace(model, name=str(initial)), sentences=texts, seed=seed, train=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints (those with trainer_state.json, which is written last), sorted by step."""
    steps = {path: path.name.rpartition("-")[2] for path in folder.glob("checkpoint-*")}  # copies may lack a number
    complete = [path for path in steps if steps[path].isdecimal() and (path / STATE).exists()]
    return sorted(complete, key=lambda path: int(steps[path]))


def newest_checkpoint(folder: Path, only_model: bool = False) -> Path | None:
    """Return the newest usable checkpoint, or None. Print a warning for each checkpoint that is skipped because its
    state is damaged, or because the optimizer's state is missing (allowed if `only_model`)."""
    for path in reversed(complete_checkpoints(folder)):
        if not read_json(path / STATE):
            print(f"skipping checkpoint {path}: its {STATE} is damaged", flush=True)
        elif not only_model and not any(path.rglob("*optim*")):
            print(f"skipping checkpoint {path}: it has no optimizer state", flush=True)
        else:
            return path
    return None


def save_with_card(encoder: Any, output: Output, config: Any, metrics: Mapping[str, Any], plots: Sequence[str]) -> None:
    """Save an encoder in the folder of its run, with a model card that shows the recipe, the scores in `metrics` (the
    content of metrics.json) and `plots` (lines of Markdown)."""
    drop_head(encoder)
    card = encoder.model_card_data
    card.tags = [tag for tag in card.tags if tag != "loss:ByLength"]  # the wrapped loss has its own tag
    for dataset in (*card.train_datasets, *card.eval_datasets):  # the card does not escape texts from files
        if dataset.get("name"):
            dataset["name"] = cell(dataset["name"])
        examples = dataset.get("examples") or {}
        dataset["examples"] = {column: [_text(value) for value in values] for column, values in examples.items()}
    with replacing_model(output) as folder:
        encoder.save_pretrained(str(folder))
        path = folder / "README.md"
        page = path.read_text(encoding="utf-8") if path.is_file() else ""
        base = cell(Path(config.model.name).name)
        page = re.sub(r"<!-- - \*\*Base model:.*-->", lambda _: f"- **Base model:** {base}", page)
        page = page.replace("sentence_transformers_model_id", output.path.name)
        first, heading, rest = page.partition(HEADING)
        path.write_text("\n".join([first, *_section(config, metrics, plots), ""]) + heading + rest, encoding="utf-8")


def _text(value: Any) -> Any:
    """Escape a value for a table in sentence-transformers' card, which adds <code> around it and \\ before pipes."""
    if isinstance(value, list):
        return [_text(each) for each in value]
    return cell(value).replace("\\|", "&#124;") if isinstance(value, str) else value


def _section(config: Any, metrics: Mapping[str, Any], plots: Sequence[str]) -> list[str]:
    settings = recorded(config, digests=False)
    recipe = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    for _, path in marked(config, "read"):
        if os.path.isabs(path):
            recipe = recipe.replace(path, Path(path).name)
    scores = [[cell(name), *values] for name, *values in score_rows(metrics)]
    certificate = metrics.get("certificate")
    return [
        "## Recipe and scores",
        "",
        f"`raoe-train train {RECIPE} --output DIR` repeats this training. Settings in {RECIPE}, next to this page:",
        "",
        *(f"    {line}" for line in recipe.splitlines()),
        "",
        f"{metrics['steps']:,} steps in {metrics['seconds']:,} s{'; main metric x 100:' if scores else '.'}",
        *(table(["", "before", "after", "change"], scores) if scores else []),
        *plots,
        *(["", *(f"    {line}" for line in table_of(certificate).splitlines())] if certificate else []),
        "",
        f"Made with {made_with({'commit': metrics['commit'] or 'unknown', **metrics['versions']})}.",
    ]
