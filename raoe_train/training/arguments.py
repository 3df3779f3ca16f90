"""The section `training` of a recipe: sentence-transformers' training arguments, by their own names."""

import argparse
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.config import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, to_dict
from raoe_train.encoders.preflight import check_device
from raoe_train.training.run_directory import CHECKPOINTS

OWN = ("patience", "min_steps", "by_length", "keep")
NOT_TAKEN = ("output_dir", "local_rank")  # the first is OUTPUT/checkpoints, the second torchrun's to say
BY_PREMISE = "by_premise"  # a batch_sampler of ours, PremiseBatchSampler
DEV_METRIC = "eval_dev_spearman_cosine"
When = Literal["no", "steps", "epoch"]


@dataclass
class Training:
    """How to train; any other field of SentenceTransformerTrainingArguments is a key here, too.

    Args:
        num_train_epochs: passes over the data
        per_device_train_batch_size: rows of a batch
        learning_rate: peak learning rate
        warmup_ratio: share of steps used for warm-up
        seed: seed of everything that is drawn
        bf16: bfloat16; auto uses it where the device computes in it
        by_length: encode batches in runs of similar length; packed leaves out all padding on a GPU
        keep: weight of the regularizer that holds embeddings where they were; auto chooses by the scores
        patience: evaluations without improvement before training stops
        min_steps: raise the number of epochs until there are so many steps
        max_steps: number of steps, in place of epochs
        per_device_eval_batch_size: rows of a batch in evaluation
        gradient_accumulation_steps: batches of a step; for a larger batch to rank pairs in, see loss.mini_batch_size
        warmup_steps: steps used for warm-up or, below 1, their share
        weight_decay: weight decay of AdamW
        max_grad_norm: norm to clip gradients to; 0 for no clipping
        fp16: float16 with loss scaling
        eval_strategy: when to evaluate; epoch where there is a dev set
        eval_steps: steps between evaluations, or their share of all
        save_strategy: when to write checkpoints; by default as eval_strategy
        save_steps: steps between checkpoints; by default eval_steps
        save_total_limit: checkpoints to keep
        logging_steps: steps between log entries
        report_to: trackers to report to, such as tensorboard or wandb
        dataloader_num_workers: processes that prepare batches
        batch_sampler: how batches are drawn; by_premise keeps the pairs of a premise together
        gradient_checkpointing: recompute activations in the backward pass
        learning_rate_mapping: learning rates of parameters by regular expression
    """

    num_train_epochs: PositiveFloat = 3
    per_device_train_batch_size: PositiveInt = 8
    learning_rate: PositiveFloat = 5e-5
    warmup_ratio: Share | None = None
    seed: Seed = 42
    bf16: bool | Literal["auto"] = False
    by_length: bool | Literal["packed"] = True
    keep: NonNegativeFloat | Literal["auto"] = 0
    patience: PositiveInt | None = None
    min_steps: NonNegativeInt = 0
    max_steps: PositiveInt | None = None
    per_device_eval_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    warmup_steps: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat = 0
    max_grad_norm: NonNegativeFloat = 1
    fp16: bool = False
    eval_strategy: When | None = None
    eval_steps: PositiveFloat | None = None
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    save_steps: PositiveFloat | None = None
    save_total_limit: PositiveInt | None = 2
    logging_steps: PositiveFloat = 10
    report_to: str | list[str] = "none"
    dataloader_num_workers: NonNegativeInt = 0
    batch_sampler: str | None = None
    gradient_checkpointing: bool = False
    learning_rate_mapping: dict[str, NonNegativeFloat] | None = None
    others: dict[str, Any] = field(default_factory=dict)


def declare_training(parser: Any, key: str = "training") -> None:
    """Add the fields of Training to a parser, and all others of SentenceTransformerTrainingArguments, which help leaves
    out: there are more than a hundred."""
    from sentence_transformers import SentenceTransformerTrainingArguments

    parser.add_class_arguments(Training, key, skip={"others"})
    known = {each.name for each in fields(Training)} | {*NOT_TAKEN}
    for each in fields(SentenceTransformerTrainingArguments):
        if each.init and each.name not in known:
            parser.add_argument(f"--{key}.{each.name}", type=Any, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def check_training(training: Training, has_dev: bool) -> None:
    """ValueError for settings of evaluation that would have no effect."""
    if training.patience is not None and not has_dev:
        raise ValueError("training.patience needs data.dev to see whether the model still improves")
    if training.eval_strategy not in (None, "no") and not has_dev:
        raise ValueError(
            f"training.eval_strategy {training.eval_strategy} needs data.dev to evaluate on; "
            "without it the last model is kept: --training.eval_strategy no"
        )
    if training.eval_steps is not None and training.eval_strategy == "epoch":
        raise ValueError("training.eval_steps has no effect with eval_strategy epoch: leave one of them out")


def trainer_settings(training: Training, output: Path, *, device: str | None, has_dev: bool) -> dict[str, Any]:
    """Keywords of SentenceTransformerTrainingArguments: the recipe's, and ours where it leaves them open; ValueError
    for what they refuse."""
    import torch
    from sentence_transformers import SentenceTransformerTrainingArguments
    from transformers.integrations import get_reporting_integration_callbacks

    from raoe_train.training.training_data import PremiseBatchSampler

    given = {name: value for name, value in to_dict(training).items() if name not in OWN and value is not None}
    if (ratio := given.pop("warmup_ratio", None)) is not None:
        given["warmup_steps"] = ratio  # below 1 a share, in transformers 5
    del given["gradient_checkpointing"]  # the job does it: see raoe_train.jobs.train
    if given.get("batch_sampler") == BY_PREMISE:
        given["batch_sampler"] = PremiseBatchSampler
    check_device(device)
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    if given["bf16"] == "auto":
        given["bf16"] = multiplies_bfloat16(use_cpu)
    # a number of steps says when
    when = given.get("eval_strategy") or ("no" if not has_dev else "steps" if "eval_steps" in given else "epoch")
    each_evaluation = "epoch" if when == "no" else when  # so that the best model is one that was kept
    made = {
        "output_dir": str(output / CHECKPOINTS),
        "logging_nan_inf_filter": False,  # training stops there; see raoe_train.training.callbacks
        "run_name": output.name or None,  # what trackers call it
        "disable_tqdm": not sys.stderr.isatty(),
        "eval_strategy": when,
        "save_strategy": "steps" if "save_steps" in given else each_evaluation,
        "save_steps": given.get("eval_steps", 500),
        "load_best_model_at_end": has_dev and when != "no",
        "metric_for_best_model": DEV_METRIC if has_dev else None,
        "greater_is_better": True if has_dev else None,
        "dataloader_drop_last": rank_and_world()[1] > 1,  # the trainer would; unequal batches hang
        "dataloader_pin_memory": torch.cuda.is_available(),
        # transformers takes bf16 on a CPU only where it is told that the CPU is meant.
        "use_cpu": use_cpu,
        "restore_callback_states_from_checkpoint": training.patience is not None,
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
        "per_device_train_batch_size": world * int(settings["per_device_train_batch_size"]),
        "accelerator_config": {**(settings.get("accelerator_config") or {}), "split_batches": True},
    }
