"""The section `training` of a recipe: transformers' training arguments, under shorter names and over our defaults."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.encoders.load import check_device
from raoe_train.recipe import Option, argument, convert, keys, nearest, parameters
from raoe_train.training.run_directory import CHECKPOINTS

NAMES = {
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "epochs",
}
OWN = ("patience", "min_steps", "by_length", "keep", "interpolate")  # keys that are ours
BY_PREMISE = "by_premise"  # a batch_sampler of ours, PremiseBatchSampler
PLAIN = (bool, int, float, bool | None, int | None, float | None)
AUTO = "auto"  # of bf16: where the machine is made for it
DEV_METRIC = "eval_dev_spearman_cosine"


When = Literal["no", "steps", "epoch"]


@dataclass
class Training:
    """What may be said under `training`, and what it has to be; others are any field of
    SentenceTransformerTrainingArguments."""

    batch_size: Annotated[int, Option("rows of a batch", least=1)] = 8
    eval_batch_size: Annotated[int, Option("sentences at a time", least=1)] = 8
    epochs: Annotated[float, Option("passes over the data", above=0)] = 3
    max_steps: Annotated[int | None, Option("steps, in place of epochs", least=1)] = None
    min_steps: Annotated[int, Option("steps at least: more epochs where one has few", least=0)] = 0
    learning_rate: Annotated[float, Option("the highest", above=0)] = 5e-5
    warmup_steps: Annotated[float, Option("steps in which it rises, or, below 1, their share", least=0)] = 0
    warmup_ratio: Annotated[float | None, Option("their share", least=0, below=1)] = None
    weight_decay: Annotated[float, Option("AdamW's", least=0)] = 0
    adam_beta1: Annotated[float, Option("AdamW's", least=0, below=1)] = 0.9
    adam_beta2: Annotated[float, Option("AdamW's", least=0, below=1)] = 0.999
    adam_epsilon: Annotated[float, Option("AdamW's", above=0)] = 1e-8
    max_grad_norm: Annotated[float, Option("gradients are scaled to it; 0 leaves them", least=0)] = 1
    gradient_accumulation_steps: Annotated[int, Option("batches of a step", least=1)] = 1
    seed: Annotated[int, Option("of all that is drawn", least=0, below=2**32)] = 42
    data_seed: Annotated[int | None, Option("of the order of batches [seed]", least=0, below=2**32)] = None
    bf16: Annotated[bool | Literal["auto"], "bfloat16; auto: where the machine is made for it"] = False
    fp16: Annotated[bool, "float16 with a scaled loss"] = False
    eval_strategy: Annotated[When | None, "when to evaluate [epoch with data.dev]"] = None
    eval_steps: Annotated[float | None, Option("steps between evaluations [logging_steps]", above=0)] = None
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"] | None, "checkpoints [eval_strategy]"] = None
    save_steps: Annotated[float, Option("steps between checkpoints [eval_steps]", above=0)] = 500
    save_total_limit: Annotated[int | None, Option("checkpoints that are kept", least=1)] = 2
    logging_steps: Annotated[float, Option("steps between lines of log.jsonl", above=0)] = 10
    report_to: Annotated[str | list[str], "where else the log goes: tensorboard, trackio, wandb ..."] = "none"
    dataloader_num_workers: Annotated[int, Option("processes that make batches", least=0)] = 0
    patience: Annotated[int | None, Option("evaluations without a better one that end training", least=1)] = None
    by_length: Annotated[bool | Literal["packed"], "batches in runs of like length"] = True
    keep: Annotated[
        float | Literal["auto"],
        Option("weight of holding the embeddings of a batch's texts where they were; auto: by the scores", least=0),
    ] = 0
    interpolate: Annotated[
        list[float] | None,
        Option("weights between before and after, to keep those best on data.dev", least=0, most=1),
    ] = None
    learning_rate_mapping: Annotated[dict[str, float] | None, Option("pattern of names: their rate", least=0)] = None
    eval_delay: Annotated[float, Option("epochs or steps before the first evaluation", least=0)] = 0
    eval_accumulation_steps: Annotated[int | None, Option("predictions go to the CPU after so many", least=1)] = None
    torch_empty_cache_steps: Annotated[int | None, Option("a GPU's cache is emptied every so many", least=1)] = None
    dataloader_prefetch_factor: Annotated[int | None, Option("batches that a process makes ahead", least=1)] = None
    ddp_bucket_cap_mb: Annotated[int | None, Option("megabytes of gradients that go together", least=1)] = None
    ddp_timeout: Annotated[int, Option("seconds that processes wait for each other", least=1)] = 1800
    neftune_noise_alpha: Annotated[float | None, Option("noise on embeddings of tokens", least=0)] = None
    label_smoothing_factor: Annotated[float, Option("of a language model's loss", least=0, below=1)] = 0


def training_settings(given: Any, key: str = "training") -> dict[str, Any]:
    """What a recipe says, each key under one of its names; ValueError for a value that cannot be."""
    known, found = parameters(Training), {}
    for word, value in convert(dict[str, Any], given, key).items():
        name = NAMES.get(word, word)
        found[name] = argument(known[name], value, f"{key}.{name}") if name in known and value is not None else value
    if "report_to" in found:  # nothing at all would be all that is installed
        found["report_to"] = found["report_to"] or "none"
    return found


def training_keys(where: str) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, help), for the command line's help."""
    yield from keys(Training, where)


def check_training(training: dict[str, Any], has_dev: bool) -> None:
    """ValueError for an unknown key, or one that needs development pairs where there are none."""
    from sentence_transformers import SentenceTransformerTrainingArguments

    if training.get("patience") is not None and not has_dev:
        raise ValueError("training.patience needs data.dev to see whether the model still improves")
    if training.get("interpolate") is not None:
        if not has_dev:
            raise ValueError("training.interpolate needs data.dev to choose a weight by")
        if not training["interpolate"]:
            raise ValueError("training.interpolate is empty: say numbers from 0, before training, to 1, after it")
    if training.get("eval_strategy", "no") != "no" and not has_dev:
        raise ValueError(
            f"training.eval_strategy {training['eval_strategy']} needs data.dev to evaluate on; "
            "without it the last model is kept: --training.eval_strategy no"
        )
    if "output_dir" in training:
        raise ValueError("training.output_dir is output/checkpoints; set output")
    if "local_rank" in training:
        raise ValueError("training.local_rank is for torchrun or accelerate to say; leave it out")
    known = [field.name for field in fields(SentenceTransformerTrainingArguments) if field.init]
    words = [f"training.{name}" for name in (*known, *NAMES.values(), *OWN)]
    for key in training:
        if f"training.{key}" not in words:
            raise ValueError(f"unknown key training.{key}{nearest(f'training.{key}', words)}")


def trainer_settings(training: dict[str, Any], output: Path, *, device: str | None, has_dev: bool) -> dict[str, Any]:
    """Fields of transformers.TrainingArguments: the recipe's, over our defaults; ValueError for what it refuses."""
    import torch
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks

    from raoe_train.training.premises import PremiseBatchSampler

    longer = {short: name for name, short in NAMES.items()}
    # what Training does not say of a key its type does
    types = typing.get_type_hints(SentenceTransformerTrainingArguments)
    given = {
        longer.get(key, key): convert(types[key], value, f"training.{key}") if types.get(key) in PLAIN else value
        for key, value in training.items()
        if key not in (*OWN, "bf16") and value is not None  # null takes back what another layer said
    }
    given |= {"bf16": training["bf16"]} if "bf16" in training else {}
    if given.get("batch_sampler") == BY_PREMISE:
        given["batch_sampler"] = PremiseBatchSampler
    check_device(device)
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    check_backend(device or ("cpu" if use_cpu else torch.accelerator.current_accelerator()))
    if given.get("bf16") == AUTO:
        given["bf16"] = multiplies_bfloat16(use_cpu)
    when = given.get("eval_strategy", "epoch" if has_dev else "no")
    made = {
        "output_dir": str(output / CHECKPOINTS),
        "seed": 42,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # a run stops there; see raoe_train.training.stop_at_nan
        "report_to": "none",
        "run_name": output.name or None,  # what trackers call it
        "disable_tqdm": not sys.stderr.isatty(),
        "eval_strategy": when,
        # A checkpoint for each evaluation, so that the best model is one that was kept.
        "save_strategy": when if when != "no" else "epoch",
        "save_steps": given.get("eval_steps", 500),
        "save_total_limit": 2,
        "load_best_model_at_end": has_dev and when != "no",
        "metric_for_best_model": DEV_METRIC if has_dev else None,
        "greater_is_better": True if has_dev else None,
        "dataloader_drop_last": rank_and_world()[1] > 1,  # the trainer would; unequal batches hang
        "dataloader_pin_memory": torch.cuda.is_available(),
        # transformers takes bf16 on a CPU only where it is told that the CPU is meant.
        "use_cpu": use_cpu,
        "restore_callback_states_from_checkpoint": training.get("patience") is not None,
        **given,
    }
    try:
        # starts the group of torchrun's processes, too: they agree on things before there is a trainer
        arguments = SentenceTransformerTrainingArguments(**made)
        _ = arguments.device
        for tracker in get_reporting_integration_callbacks(arguments.report_to):
            tracker()  # which says what is not installed
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        raise ValueError(f"training: {error}") from None
    return made


def check_backend(device: Any) -> None:
    """ValueError where RAOE_KERNELS_BACKEND names no backend, or one that cannot run on this device."""
    import torch

    from raoe_kernels import pairwise_cosine

    row = torch.ones(1, 1, device=device)
    try:
        pairwise_cosine(row, row)
    except RuntimeError as error:
        raise ValueError(f"RAOE_KERNELS_BACKEND: {error}") from None


def multiplies_bfloat16(use_cpu: bool) -> bool:
    """Whether the device has units for products of bfloat16: a GPU's tensor cores, a CPU's AVX512-BF16 or AMX. On
    others they are made of float32's, and slower. Not where torch is too old to say."""
    import torch

    if not use_cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    known: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def for_all_processes(settings: dict[str, Any]) -> dict[str, Any]:
    """Training arguments whose batches are drawn for all processes together and then cut. Drawn for each, those of one
    step would be of different sources, whose scores cannot be compared, and would depend on the number of processes."""
    world = rank_and_world()[1]
    if world == 1:
        return settings
    return {
        **settings,
        "per_device_train_batch_size": world * int(settings.get("per_device_train_batch_size", 8)),
        "accelerator_config": {**(settings.get("accelerator_config") or {}), "split_batches": True},
    }
