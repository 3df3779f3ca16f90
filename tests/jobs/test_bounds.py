"""Every number that a job may be told has bounds, which help says and which are checked before anything is done."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import pytest
from sentence_transformers import SentenceTransformerTrainingArguments

from raoe_train.cli import JOBS, job_of, load
from raoe_train.generation.sampling import Sampling
from raoe_train.losses.registry import LOSSES, loss_parameters, loss_settings
from raoe_train.recipe import Option, Parameter, choices, declared, keys, parameters
from raoe_train.training.arguments import NAMES, Training

NEVER = ("nan", "inf", "-inf", "1e400", 10**400, "-1e400")  # of any number
# What negative numbers, and 0, mean something to; by hand.
NEGATIVE = {"data.score_scale", "mining.threshold", "loss.bias of sigmoid", "loss.margin of gist"}
ZERO = NEGATIVE | {
    "data.dev_share", "model.bidirectional_layers", "model.dropout", "model.scratch.dropout", "teacher.omega",
    "model.scratch.seed", "polarity.seed", "seed", "seeds", "mining.seed", "seeds.seed", "generation.seed",
    "mining.drop", "examples", "weights", "generation.guidance",
    *(f"{where}classifier.{key}" for where in ("", "evaluation.") for key in ("tenacity", "dropout", "tol", "seed")),
    *(f"loss.{key}" for key in (
        "rank_weight", "angle_weight", "cosine_weight", "consistency_weight", "distillation_weight", "memory_size",
        "hardness_strength", "margin")),
    *(f"training.{key}" for key in (
        "min_steps", "warmup_steps", "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm",
        "seed", "data_seed", "dataloader_num_workers", "keep", "interpolate", "learning_rate_mapping", "eval_delay",
        "neftune_noise_alpha", "label_smoothing_factor")),
    *(f"generation.{key}" for key in (
        "bad_words_ids", "no_repeat_ngram_size", "min_new_tokens", "suppress_tokens", "top_k", "min_p",
        "epsilon_cutoff", "eta_cutoff", "eos_token_id")),
}  # fmt: skip


def numeric(hint: Any) -> bool:
    parts = typing.get_args(hint)
    return hint in (int, float) or (typing.get_origin(hint) is not typing.Literal and any(map(numeric, parts)))


def options(of: Any, where: str = "") -> Iterator[tuple[str, Parameter]]:
    """(dotted key, what is declared) of all that a job may be told but its loss."""
    for name, each in parameters(of).items():
        sections = {"training": Training, "decoding": Sampling}
        section = sections.get(name) if each.option.keys else each.type
        if section is not None and dataclasses.is_dataclass(section):
            yield from options(section, where if name == "decoding" else f"{where}{name}.")
        elif not each.option.keys:
            yield where + name, each


def senseless(key: str, value_type: Any) -> list[Any]:
    found: list[Any] = [*NEVER]
    found += ["1" + "0" * 30] * ("float" not in str(value_type))
    base = key.partition(" of ")[0]
    return found + ["-1"] * (key not in NEGATIVE) + ["0"] * (key not in ZERO and base not in ZERO)


def refused(key: str, value: Any, take: Callable[[Any], Any], hint: Any) -> None:
    """That a value ends in a sentence about its key."""
    value = {"a": value} if "dict[" in str(hint) else [value] if "list[" in str(hint) else value
    try:
        with pytest.raises(ValueError, match=rf"^{key}(\.a)? must be .*, got ") as error:
            take(value)
    except BaseException as wrong:
        raise AssertionError(f"{key} {value!r} is taken") from wrong
    assert len(str(error.value)) < 300


def taken(job: str, key: str, value: Any) -> None:
    """What a command does before it begins."""
    loaded = load(job, None, {key: value, **({"generation.do_sample": True} if job == "generate" else {})})
    if job == "generate":
        Sampling.of(loaded.generation.decoding)


@pytest.mark.parametrize("job", JOBS)
def test_no_senseless_number_is_taken(job):
    lines = {key: text for key, _, text in keys(job_of(job))}
    for key, each in options(job_of(job)):
        if numeric(each.type):
            for value in senseless(key, each.type):
                refused(key, value, partial(taken, job, key), each.type)
            assert key in NEGATIVE or "at least" in lines[key] or "above" in lines[key], f"help of {key}"


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_takes_a_senseless_number(loss):
    lines = [(key, text) for key, _, text in keys(job_of("train")) if f" {loss}" in text.replace("(", " ")]
    for name, each in loss_parameters(loss).items():
        key = f"loss.{name}"
        if numeric(each.type):
            named = f"{key} of {loss}"
            for value in senseless(named, each.type):
                refused(key, value, lambda value, name=name: loss_settings({"name": loss, name: value}), each.type)
            text = next(text for found, text in lines if found == key)
            assert {key, named} & NEGATIVE or "above" in text or "at least" in text


def test_every_number_of_transformers_has_bounds():
    """Those of the trainer's arguments that Training does not name are taken as they are."""
    types = typing.get_type_hints(SentenceTransformerTrainingArguments)
    theirs = {each.name for each in dataclasses.fields(SentenceTransformerTrainingArguments) if each.init}
    ours = {each.name for each in dataclasses.fields(Training)} | set(NAMES)
    assert {name for name in theirs if numeric(types[name])} - ours == {"local_rank"}  # which is an error


@pytest.mark.parametrize("job", JOBS)
def test_help_names_every_choice(job):
    lines = {key: text for key, _, text in keys(job_of(job))}
    for key, each in options(job_of(job)):
        assert all(str(word) in lines[key] for word in choices(each.type)), key


def test_what_an_annotation_says_is_seen_on_python_3_10():
    """Whose get_type_hints makes an Optional of it where the default is None."""
    hint = Annotated[int | None, Option("so many", least=1)]
    for each in (hint, typing.Optional[hint]):  # noqa: UP045
        found = declared(each, None)
        assert found == Parameter(int | None, None, Option("so many", least=1))
    assert declared(int | None, None).type == int | None
