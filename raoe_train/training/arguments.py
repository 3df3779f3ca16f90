"""The section `training` of a recipe: transformers' training arguments, under shorter names and over our defaults."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.encoders.interpolation import check_weights
from raoe_train.recipe import convert, nearest
from raoe_train.training.run_directory import CHECKPOINTS

NAMES = {
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "epochs",
}
OWN = ("patience", "by_length", "interpolate")  # keys that are ours
BY_PREMISE = "by_premise"  # a batch_sampler of ours, PremiseBatchSampler
AUTO = "auto"  # of bf16: where the machine is made for it
DEV_METRIC = "eval_dev_spearman_cosine"


def training_settings(given: Any, key: str = "training") -> dict[str, Any]:
    """What a recipe says, each key under one of its names."""
    said = {NAMES.get(name, name): value for name, value in convert(dict[str, Any], given, key).items()}
    if said.get("interpolate") is not None:
        said["interpolate"] = convert(list[float], said["interpolate"], f"{key}.interpolate")
    return said


def check_training(training: dict[str, Any], has_dev: bool) -> None:
    """ValueError for an unknown key, or one that needs development pairs where there are none."""
    from sentence_transformers import SentenceTransformerTrainingArguments

    if training.get("patience") is not None and not has_dev:
        raise ValueError("training.patience needs data.dev to see whether the model still improves")
    if training.get("interpolate") is not None:
        if not has_dev:
            raise ValueError("training.interpolate needs data.dev to choose a weight by")
        check_weights(training["interpolate"], "training.interpolate")
    if training.get("eval_strategy", "no") != "no" and not has_dev:
        raise ValueError(
            f"training.eval_strategy {training['eval_strategy']} needs data.dev to evaluate on; "
            "without it the last model is kept: --training.eval_strategy no"
        )
    if "output_dir" in training:
        raise ValueError("training.output_dir is output/checkpoints; set output")
    known = [field.name for field in fields(SentenceTransformerTrainingArguments) if field.init]
    words = [f"training.{name}" for name in (*known, *NAMES.values(), *OWN)]
    for key in training:
        if f"training.{key}" not in words:
            raise ValueError(f"unknown key training.{key}{nearest(f'training.{key}', words)}")


def trainer_settings(training: dict[str, Any], output: Path, *, device: str | None, has_dev: bool) -> dict[str, Any]:
    """Fields of transformers.TrainingArguments: the recipe's, over our defaults."""
    import torch

    from raoe_train.training.premises import PremiseBatchSampler

    longer = {short: name for name, short in NAMES.items()}
    given = {longer.get(key, key): value for key, value in training.items() if key not in OWN}
    if given.get("batch_sampler") == BY_PREMISE:
        given["batch_sampler"] = PremiseBatchSampler
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    if given.get("bf16") == AUTO:
        given["bf16"] = multiplies_bfloat16(use_cpu)
    when = given.get("eval_strategy", "epoch" if has_dev else "no")
    return {
        "output_dir": str(output / CHECKPOINTS),
        "seed": 42,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # a run stops there; see raoe_train.training.stop_at_nan
        "report_to": "none",
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


def multiplies_bfloat16(use_cpu: bool) -> bool:
    """Whether the device has units for products of bfloat16: a GPU's tensor cores, a CPU's AVX512-BF16 or AMX. On
    others they are made of float32's, and slower. Not where torch is too old to say."""
    import torch

    if not use_cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    known: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def join(settings: dict[str, Any]) -> None:
    """Start the group of torchrun's processes, before the trainer does it: they agree on things before there is one."""
    if rank_and_world()[1] > 1:
        from transformers import TrainingArguments

        keys = ("output_dir", "use_cpu", "ddp_backend", "ddp_timeout")
        _ = TrainingArguments(**{key: settings[key] for key in keys if key in settings}).device


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
