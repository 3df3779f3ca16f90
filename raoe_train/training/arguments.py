"""The recipe section `training`: sentence-transformers' training arguments, under the same names."""

import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import is_torch_tf32_available

from raoe_train.config import to_dict
from raoe_train.encoders.preflight import check_device
from raoe_train.processes import rank_and_world
from raoe_train.settings import Training
from raoe_train.training.run_directory import CHECKPOINTS

LARGE = 50e6  # number of parameters above which an encoder counts as large
RAOE_KEYS = ("patience", "min_steps", "by_length", "packed", "keep", "pretokenize")


def check_training(training: Training, has_dev: bool) -> None:
    """Raise ValueError for evaluation and checkpoint settings that have no effect or contradict each other."""
    if training.patience is not None and not has_dev:
        raise ValueError("training.patience needs a dev set to measure improvement: set data.dev or data.dev_share")
    if training.eval_strategy not in (None, "no") and not has_dev:
        raise ValueError(
            f"training.eval_strategy {training.eval_strategy!r} needs a dev set: set data.dev or data.dev_share, "
            "or, to save the last model without evaluation, use --training.eval_strategy no"
        )
    loads_best = has_dev and training.eval_strategy != "no" and training.others.get("load_best_model_at_end", True)
    if training.save_strategy == "no" and loads_best:
        raise ValueError(
            "with training.save_strategy 'no', no checkpoints are saved, so the best checkpoint cannot be selected on "
            "the dev set: remove this setting, or save the last model with --training.eval_strategy no"
        )
    if training.eval_steps is not None and training.eval_strategy == "epoch":
        raise ValueError("training.eval_steps has no effect if training.eval_strategy is 'epoch': remove one of them")


def trainer_arguments(training: Training, output: Path, *, device: str | None, has_dev: bool) -> dict[str, Any]:
    """Return keyword arguments for SentenceTransformerTrainingArguments: the recipe's settings, and defaults for
    settings that the recipe omits. Raise ValueError for settings that SentenceTransformerTrainingArguments rejects."""
    recipe = {name: value for name, value in to_dict(training).items() if name not in RAOE_KEYS and value is not None}
    if (ratio := recipe.pop("warmup_ratio", None)) is not None:
        recipe["warmup_steps"] = ratio  # transformers 5 reads numbers below 1 as a share
    del recipe["gradient_checkpointing"]  # raoe_train.jobs.train enables it
    if "." in (sampler := recipe.get("batch_sampler", "")):
        recipe["batch_sampler"] = pkgutil.resolve_name(sampler)
    check_device(device)
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    if recipe.get("bf16") == "auto":
        recipe["bf16"] = multiplies_bfloat16(use_cpu)
    if recipe.get("tf32") == "auto":
        recipe["tf32"] = True if not use_cpu and is_torch_tf32_available() else None
    # if only eval_steps is set, the strategy is steps
    strategy = recipe.get("eval_strategy") or ("no" if not has_dev else "steps" if "eval_steps" in recipe else "epoch")
    interval = "epoch" if strategy == "no" else strategy  # a checkpoint per evaluation, to load the best one
    on_cuda = torch.cuda.is_available()
    arguments = {
        "output_dir": str(output / CHECKPOINTS),
        "run_name": output.name or None,  # shown by trackers
        "disable_tqdm": not sys.stderr.isatty(),
        "eval_strategy": strategy,
        "save_strategy": "steps" if "save_steps" in recipe else interval,
        "save_steps": recipe.get("eval_steps", 500),
        "load_best_model_at_end": has_dev and strategy != "no",
        "greater_is_better": True if has_dev else None,
        "dataloader_drop_last": rank_and_world()[1] > 1,  # batches of unequal size would make processes hang
        "dataloader_pin_memory": on_cuda,
        # a batch of 512 short pairs takes a worker 90 ms, but a GPU only 20 ms
        "dataloader_num_workers": min(4, os.cpu_count() or 1) if on_cuda and not use_cpu else 0,
        "use_cpu": use_cpu,  # transformers accepts bf16 on a CPU only with use_cpu
        "bf16": False,
        "restore_callback_states_from_checkpoint": training.patience is not None,
        **recipe,
    }
    check_arguments(arguments)
    return arguments


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise ValueError for values that SentenceTransformerTrainingArguments rejects, and for trackers that are not
    installed. Under torchrun, this call also starts the process group, which is needed before the trainer exists."""
    rate = 1.0 if arguments["learning_rate"] == "auto" else arguments["learning_rate"]
    try:
        args = SentenceTransformerTrainingArguments(**{**arguments, "learning_rate": rate})
        _ = args.device
        for tracker in get_reporting_integration_callbacks(args.report_to):
            tracker()
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        raise ValueError(f"training: {error}") from None


def for_encoder(training: Training, arguments: dict[str, Any], encoder: Any, datasets: Any) -> dict[str, Any]:
    """Return the arguments, with "bf16" and the learning rate set for the encoder. Raise ValueError for float16 weights
    on a CPU with training.bf16 true, because torch's layer norm cannot mix these two dtypes on a CPU."""
    use_cpu, bf16 = arguments["use_cpu"], arguments["bf16"]
    if use_cpu and torch.float16 in {weight.dtype for weight in encoder.parameters()}:
        if training.bf16 is True:
            advice = "set model.dtype to bfloat16 or float32, or training.bf16 to false"
            raise ValueError(f"float16 weights cannot be trained on a CPU with training.bf16 true: {advice}")
        bf16 = False
    elif encoder.saved_dtypes and not arguments.get("fp16") and training.bf16 is not False:
        # multiply in bfloat16 if the device has units for it, or if frozen weights are 16-bit
        is_partly_frozen = not all(weight.requires_grad for weight in encoder.parameters())
        bf16 = bf16 or is_partly_frozen or multiplies_bfloat16(use_cpu)
    rate = arguments["learning_rate"]
    if rate == "auto":
        size = sum(weight.numel() for weight in encoder.parameters())
        rate, reason = 5e-5 if size > LARGE else 2e-4, f"{size / 1e6:.0f}M parameters"
        if any("lora_" in name for name, _ in encoder.named_parameters()):
            rate, reason = 2e-4, "an adapter"
        elif "anchor" in next(iter(datasets.values())).column_names:
            rate, reason = 2e-5, "queries and passages"
        print(f"learning rate {rate:g}, for {reason}")
    return {**arguments, "bf16": bf16, "learning_rate": rate}


def multiplies_bfloat16(use_cpu: bool) -> bool:
    """Return whether the device multiplies bfloat16 in hardware: a GPU in tensor cores, a CPU in AVX512-BF16 or AMX
    units. Other devices emulate bfloat16, which is slower than float32. Return False if torch is too old to report a
    CPU's capabilities."""
    if not use_cpu:
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
