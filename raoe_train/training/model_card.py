"""The card of a run's model: sentence-transformers' own, with recipe, scores before and after, and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from raoe_train.artifacts.report import cell, made_with, table
from raoe_train.artifacts.resume import Output, replacing_model
from raoe_train.config import to_dict
from raoe_train.encoders.scratch import drop_head
from raoe_train.training.measures import in_words, score_rows
from raoe_train.training.run_directory import RECIPE

BEFORE = "\n## Training Details\n"  # of their card; where it has none our section comes last


def save_with_card(
    encoder: Any, output: Output, config: Any, metrics: Mapping[str, Any], plots: Sequence[str]
) -> None:
    """Save an encoder into its run's folder; its card has the recipe, the scores in `metrics` (metrics.json's) and
    `plots`, lines of Markdown."""
    drop_head(encoder)
    card = encoder.model_card_data
    for dataset in (*card.train_datasets, *card.eval_datasets):  # which show a file's texts as they are
        if dataset.get("name"):
            dataset["name"] = cell(dataset["name"])
        shown = dataset.get("examples") or {}
        dataset["examples"] = {column: [_text(value) for value in values] for column, values in shown.items()}
    with replacing_model(output) as folder:
        encoder.save_pretrained(str(folder))
        path = folder / "README.md"
        theirs = path.read_text(encoding="utf-8") if path.is_file() else ""
        first, heading, rest = theirs.partition(BEFORE)
        path.write_text("\n".join([first, *_section(config, metrics, plots), ""]) + heading + rest, encoding="utf-8")


def _text(value: Any) -> Any:
    """What a table of theirs shows of a row as text: it writes <code> around it, and a backslash before each pipe."""
    if isinstance(value, list):
        return [_text(each) for each in value]
    return cell(value).replace("\\|", "&#124;") if isinstance(value, str) else value


def _section(config: Any, metrics: Mapping[str, Any], plots: Sequence[str]) -> list[str]:
    settings = _set(to_dict(replace(config, output=None, overwrite=False)), to_dict(type(config)()))
    recipe = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return [
        "## What it was trained on, and what came of it",
        "",
        f"`raoe-train train {RECIPE} --output DIR` trains it again; {RECIPE} is beside this page. What it sets:",
        "",
        *(f"    {line}" for line in recipe.splitlines()),
        "",
        f"Main metric x 100 before and after {metrics['steps']:,} steps in {metrics['seconds']:,} s:",
        *table(["", "before", "after"], [[cell(name), *both] for name, *both in score_rows(metrics)]),
        "",
        *(cell(sentence) for sentence in in_words(metrics)),
        *plots,
        "",
        f"Made with {made_with({'commit': metrics['commit'] or 'unknown', **metrics['versions']})}.",
    ]


def _set(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe sets: the settings that are not the defaults, and classes."""
    found = {}
    for key, value in settings.items():
        default = defaults.get(key)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            value = _set(value, default)
        if value not in (default, {}) or key == "class_path":
            found[key] = value
    return found
