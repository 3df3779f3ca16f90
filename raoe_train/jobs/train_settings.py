"""Settings of the job `train`: the choice of a loss that fits the data, and checks that run before any data is read."""

from dataclasses import replace
from typing import Any

from raoe_train.config import Choice
from raoe_train.data.sources import Source, roles_in
from raoe_train.jobs.settings import TrainConfig
from raoe_train.losses import AutoLoss
from raoe_train.losses.collators import LISTS
from raoe_train.processes import rank_and_world
from raoe_train.settings import Teacher
from raoe_train.training.arguments import check_training


def by_data(config: TrainConfig) -> TrainConfig:
    """Replace AutoLoss with the loss that fits the columns of the first training source, and print the choice."""
    if config.loss.chosen is not AutoLoss or not config.data.train:
        return config
    source, columns, keywords = config.data.train[0], config.data.columns, dict[str, Any]()
    roles = roles_in(source, columns)
    if "score" in roles or {"label", "sentence1"} <= roles:
        name, reason = "PearsonLoss", "scores" if "score" in roles else "labels"
    elif "anchor" in roles:
        name, reason, keywords = "InfoNCELoss", "rows of queries and passages", {"mini_batch_num_tokens": 16384}
    else:
        fields = Source(source, columns, "skip").first_columns()
        advice = "map a column, for example --data.columns score=COLUMN, or set --loss CLASS (see --loss.help)"
        names = ", ".join(map(repr, fields))
        if len(fields) == 1 and ";" in names:
            advice = "separate columns with commas in .csv files, and with tabs in .tsv files"
        problem = "neither a column named score or anchor (query) nor labelled sentence pairs"
        raise ValueError(f"{source} has {problem}; its columns are {names}: {advice}")
    print(f"{source} has {reason}, so the loss is {name}")
    keywords |= {"gather_across_devices": True} if rank_and_world()[1] > 1 else {}
    return replace(config, loss=Choice(name, keywords)).complete()


def check_config(config: TrainConfig) -> None:
    """Raise ValueError for settings that contradict each other, before any data is read."""
    data, teacher, loss = config.data, config.teacher, config.loss.chosen
    name, lists = loss.__name__, loss.reads.name == LISTS.name
    if not data.train:
        raise ValueError("--data.train is missing: set it to the training data")
    if teacher.name is None and (loss.asks_teacher or (lists and teacher.information != "ranking")):
        hint = " (or set --teacher.information ranking, which uses only the order of each list)" if lists else ""
        raise ValueError(f"--teacher.name is missing: set it to an encoder's name, as {name} needs a teacher{hint}")
    changed = [key for key, value in vars(teacher).items() if value != getattr(Teacher(), key) and key != "device"]
    if changed and not (loss.asks_teacher or lists):
        raise ValueError(f"{name} does not use a teacher: remove --teacher.{changed[0]}")
    if data.redraw and config.training.batch_sampler is not None:
        raise ValueError("data.redraw uses its own batch sampler: remove training.batch_sampler")
    if data.redraw and data.max_rows is None:
        raise ValueError("data.redraw needs --data.max_rows: set it to the number of rows to draw in each epoch")
    scale = data.score_scale
    if scale and len(scale) not in (2, 2 * len(data.train)):
        raise ValueError(f"data.score_scale must contain 2 numbers, or 2 for each source in data.train; got {scale}")
    if config.evaluation.certificate:
        if not (data.dev or data.dev_share):
            raise ValueError("evaluation.certificate needs a dev set: set data.dev or data.dev_share")
        if config.training.save_strategy == "no":
            raise ValueError("evaluation.certificate needs checkpoints: remove training.save_strategy 'no'")
        if "SHARDED" in str(config.training.others.get("fsdp_config")):
            advice = "remove state_dict_type from training.fsdp_config"
            raise ValueError(f"evaluation.certificate needs full checkpoints: {advice}")
    elif data.guard:
        raise ValueError("data.guard has no effect without evaluation.certificate: remove data.guard")
    if config.training.others.get("fsdp") and config.model.load_in_4bit:
        raise ValueError("training.fsdp cannot shard 4-bit weights: remove training.fsdp or model.load_in_4bit")
    check_training(config.training, bool(data.dev or data.dev_share))
