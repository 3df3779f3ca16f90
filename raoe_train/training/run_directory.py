"""The directory of a training run: its settings, checkpoints, final model and model card."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import sort_checkpoints

from raoe_train.encoders.scratch import drop_head
from raoe_train.outputs import Output, partial, read_json, remove, replacing, replacing_model, set_modes
from raoe_train.processes import on_rank_zero
from raoe_train.settings import SCRATCH, Model
from raoe_train.training.certificate import CERTIFICATE

RECIPE, METRICS, LOG = "recipe.yaml", "metrics.json", "log.jsonl"
CHECKPOINTS, INITIAL, TEACHER = "checkpoints", "initial", "teacher"  # folders of an unfinished run
EVENTS, PICTURE, REJECTED = "tensorboard", "run.png", "rejected"
FILES = (RECIPE, METRICS, LOG, CERTIFICATE, PICTURE, CHECKPOINTS, INITIAL, TEACHER, EVENTS, REJECTED)
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
        remove(whole := partial(initial))  # a killed process may have left this folder
        new[0].save_pretrained(str(whole), create_model_card=False)
        set_modes(whole)
        whole.replace(initial)  # atomically, because half a tokenizer would load as a different tokenizer

    # only rank 0 creates the encoder, because transformers saves files only on rank 0 of a process group
    on_rank_zero(make)
    return new[0] if new else load_encoder(replace(model, name=str(initial)), sentences=texts, seed=seed, train=True)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints (those with trainer_state.json, which is written last), sorted by step."""
    paths = map(Path, sort_checkpoints(str(folder)))  # includes copies, such as checkpoint-12-old
    numbered = (path for path in paths if path.name.rpartition("-")[2].isdecimal())
    return [path for path in numbered if (path / TRAINER_STATE_NAME).exists()]


def newest_checkpoint(folder: Path, only_model: bool = False) -> Path | None:
    """Return the newest usable checkpoint, or None. Print a warning for each checkpoint that is skipped because its
    state is damaged or (unless `only_model`) because the optimizer state is missing."""
    for path in reversed(complete_checkpoints(folder)):
        if not read_json(path / TRAINER_STATE_NAME):
            print(f"skipping checkpoint {path}: its {TRAINER_STATE_NAME} is damaged", flush=True)
        elif not only_model and not any(path.rglob("*optim*")):
            print(f"skipping checkpoint {path}: it has no optimizer state", flush=True)
        else:
            return path
    return None


def save_with_card(encoder: Any, output: Output, section: Sequence[str], name: str) -> None:
    """Save an encoder in its run's folder, and insert the paragraphs of `section` into the model card. `name` is the
    name or path of the encoder before training."""
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
        base = f"- **Base model:** {cell(Path(name).name)}"
        page = re.sub(r"<!-- - \*\*Base model:.*-->", lambda _: base, page)
        page = page.replace("sentence_transformers_model_id", output.path.name)
        first, heading, rest = page.partition(HEADING)
        path.write_text("\n\n".join([first.rstrip(), *section, ""]) + heading + rest, encoding="utf-8")


def cell(text: str) -> str:
    """Escape a text for Markdown. Return a single line in which nothing is interpreted as Markdown, HTML or a URL."""
    escaped = re.sub(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text.replace("&", "&amp;").replace("<", "&lt;"))
    line = " ".join(re.sub(r"(?i)(:)(//)|(w)(ww\.)", r"\1\3<!-- -->\2\4", escaped).split())
    return re.sub(r"^(\d*)([#>]|[-+](?=\s|$|--)|(?<=\d)[.)](?=\s|$))", r"\1\\\2", line)  # heading, list or quote


def _text(value: Any) -> Any:
    """Escape a value for a table in the model card, where sentence-transformers adds <code> and escapes pipes."""
    if isinstance(value, list):
        return [_text(each) for each in value]
    return cell(value).replace("\\|", "&#124;") if isinstance(value, str) else value


def find_best(folder: Path) -> None:
    """Update the best checkpoint's path in each checkpoint's trainer state, because the folder may have been moved."""
    for file in folder.rglob(TRAINER_STATE_NAME):
        state = TrainerState.load_from_json(str(file))
        moved = file.parent.parent / Path(state.best_model_checkpoint or "").name
        if state.best_model_checkpoint and moved.is_dir() and not Path(state.best_model_checkpoint).is_dir():
            state.best_model_checkpoint = str(moved)
            with replacing(file) as temporary:
                state.save_to_json(str(temporary))
