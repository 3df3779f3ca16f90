"""Configuration classes for the jobs. This file does not import torch, so that help and shell completion are fast."""

import contextlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from raoe_train import settings
from raoe_train.config import (
    OTHERS,
    Anything,
    Choice,
    File,
    Folder,
    Key,
    PositiveInt,
    RecordFile,
    Source,
    Suite,
    TaskName,
    Unrecorded,
    convert,
    hints_of,
    keywords_of,
    nearest,
)
from raoe_train.settings import FrozenEncoder, Model

# Training arguments that are not settings: output_dir is OUTPUT/checkpoints, and torchrun sets local_rank
NOT_TAKEN = (OTHERS, "output_dir", "local_rank")
NO_KEYS = ("self", "model", "embed", "similarity_fct")  # constructor arguments of losses that are not settings


@dataclass
class TrainConfig:
    """The loss and output of a training run, and whether it is a dry run.

    Args:
        loss: class in raoe_train.losses, or import path of your own class; --loss.ARGUMENT VALUE sets an argument
        output: directory for the model, recipe.yaml, metrics.json, log.jsonl and run.png
        overwrite: replace an output that was made with other settings
        dry_run: train only a few steps, to measure memory and time; no files are written
    """

    essentials: ClassVar[tuple[str, ...]] = (
        "model.name", "data.train", "data.dev", "loss", "training.num_train_epochs",
        "training.per_device_train_batch_size", "training.learning_rate", "training.seed", "evaluation.tasks", "output",
    )  # fmt: skip
    result: ClassVar[str] = "metrics.json"  # file in the output that has the result
    example: ClassVar[str] = "raoe-train train adapt --model.name all-MiniLM-L6-v2 --data.train pairs.tsv --output out"
    model: Model = field(default_factory=Model)
    data: settings.Data = field(default_factory=settings.Data)
    teacher: settings.Teacher = field(default_factory=settings.Teacher)
    loss: Choice = field(default_factory=lambda: Choice("RAOELoss"))
    training: settings.Training = field(default_factory=settings.Training)
    evaluation: settings.Evaluation = field(default_factory=settings.Evaluation)
    polarity: settings.Polarity = field(default_factory=settings.Polarity)
    output: Folder | None = None
    overwrite: Unrecorded[bool] = False
    dry_run: Unrecorded[bool] = False

    def complete(self) -> "TrainConfig":
        """Check the loss, its keywords and `training.others`. Return the settings, with default values for the
        loss's unset keywords. (This imports sentence-transformers.)"""
        path, others = self.loss.class_path, self.training.others
        keywords = loss_keywords(loss_class(path))
        types = {name: key.type for name, key in keywords.items()}
        values = {name: key.default for name, key in keywords.items()} | self.loss.init_args
        init_args = converted("loss", values, types, f": --loss.help {path} lists its keywords")
        if others:
            from sentence_transformers import SentenceTransformerTrainingArguments

            known = {**hints_of(SentenceTransformerTrainingArguments), **hints_of(settings.Training)}
            known["fsdp"] = bool | None  # transformers deprecates its text form
            taken = {name: hint for name, hint in known.items() if name not in NOT_TAKEN}
            others = converted("training", others, taken)
        return replace(self, loss=Choice(path, init_args), training=replace(self.training, others=others))


def converted(section: str, values: Mapping[str, Any], types: Mapping[str, Any], advice: str = "") -> dict[str, Any]:
    """Convert the values of a settings section to their `types`. Raise ValueError with `advice` for an unknown key."""
    for name in values:
        if name not in types:
            hint = nearest(f"{section}.{name}", [f"{section}.{each}" for each in types])
            raise ValueError(f"unknown key {section}.{name}{hint}{advice}")
    return {name: convert(f"{section}.{name}", value, types[name]) for name, value in values.items()}


def known_losses() -> list[str]:
    from raoe_train import losses

    return [name for name in losses.__all__ if _is_loss(getattr(losses, name))]


def _is_loss(kind: Any) -> bool:
    from raoe_train.losses import Loss

    return inspect.isclass(kind) and issubclass(kind, Loss) and not inspect.isabstract(kind)


def loss_class(name: str) -> Any:
    """Find a loss class by its name in raoe_train.losses or by its import path. Raise ValueError if there is none."""
    with contextlib.suppress(ImportError, AttributeError, ValueError, TypeError):
        found = Choice(name).chosen
        if _is_loss(found):
            return found
    hint = nearest(name.rpartition(".")[2], known_losses())
    raise ValueError(f"loss must be the name of a loss class, got {name}{hint}: --loss.help lists the known losses")


def loss_keywords(loss: Any) -> dict[str, Key]:
    """Return those constructor keywords of a loss that users can set."""
    return {name: key for name, key in keywords_of(loss).items() if name not in NO_KEYS}


@dataclass
class PrepareConfig:
    """The public data sets to prepare.

    Args:
        names: names of data sets or papers; a paper's name (raoe, bellm, ranking, margins) selects all its sets
        copies: directory with downloaded files; publishers' files, SentEval's folders, or hub data sets as OWNER/NAME
        counts: check that each set has the published number of rows
        output: directory for the files nli/snli.jsonl.gz, sts/stsb.jsonl.gz, ...
        overwrite: replace files that were written with other settings or from another version
    """

    has_record: ClassVar[bool] = False  # each file has its own
    names: list[str] = field(default_factory=list)
    copies: Source | None = None
    counts: bool = True
    output: Folder | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class ScoreConfig:
    """The teachers and the output of the job `score`.

    Args:
        teachers: two encoders, by path or hub name; by default, the two teachers of the RAOE paper
        teacher: settings for individual teachers, such as {NAME: {prompt: 'query: ', task: text-matching}}
        trust_remote_code: run custom code from the teachers' repositories; the default teachers need this
        batch_size: number of sentences per batch
        device: torch device; by default, an accelerator if there is one, else cpu
        output: file to write
        overwrite: replace an output that was made with other settings
    """

    data: settings.Pairs = field(default_factory=settings.Pairs)
    teachers: list[Source] = field(default_factory=list)
    teacher: dict[str, dict[str, Anything]] = field(default_factory=dict)
    trust_remote_code: bool = False
    batch_size: Unrecorded[PositiveInt] = 64
    device: Unrecorded[str | None] = None
    output: File | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class MineConfig:
    """The encoder, loss and output of mining.

    Args:
        model: encoder whose cosines decide which texts are neighbours
        loss: loss that the examples are for; triplet, contrastive, online_contrastive, multiple_negatives or mse
            (random pairs)
        output: file to write
        overwrite: replace an output that was made with other settings
    """

    model: FrozenEncoder = field(default_factory=FrozenEncoder)
    data: settings.Input = field(default_factory=settings.Input)
    loss: Literal["triplet", "contrastive", "online_contrastive", "multiple_negatives", "mse"] = "triplet"
    mining: settings.Mining = field(default_factory=settings.Mining)
    output: File | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class GenerateConfig:
    """The output of generation.

    Args:
        output: .jsonl file to write
        overwrite: replace an output that was made with other settings
    """

    model: settings.LanguageModel = field(default_factory=settings.LanguageModel)
    data: settings.Sentences = field(default_factory=settings.Sentences)
    generation: settings.Generation = field(default_factory=settings.Generation)
    output: File | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class EvaluateConfig:
    """The tasks and options of an evaluation.

    Args:
        tasks: tasks, each as NAME (looked up in data.dir), FILE, KIND:NAME or KIND:FILE, where KIND is sts, transfer,
            polarity or retrieval
        suite: standard suites of tasks, evaluated in addition to `tasks`; sts, transfer or all
        classifier: classifier for transfer tasks
        batch_size: number of sentences per batch
        truncate_dim: use only this many leading dimensions of the embeddings; by default, all
        output: JSON file to write
        overwrite: replace an output that was made with other settings
    """

    model: Model = field(default_factory=Model)
    tasks: list[TaskName] = field(default_factory=list)
    data: settings.Tasks = field(default_factory=settings.Tasks)
    suite: list[Suite] = field(default_factory=list)
    polarity: settings.Polarity = field(default_factory=settings.Polarity)
    classifier: settings.Classifier | None = None
    batch_size: Unrecorded[PositiveInt] = 64
    truncate_dim: PositiveInt | None = None
    output: RecordFile | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class EncodeConfig:
    """The output and batch size of encoding.

    Args:
        batch_size: number of sentences per batch
        output: .npy file to write
        overwrite: replace an output that was made with other settings
    """

    model: Model = field(default_factory=Model)
    data: settings.Input = field(default_factory=settings.Input)
    batch_size: Unrecorded[PositiveInt] = 64
    output: File | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class ExportConfig:
    """The output of an export.

    Args:
        merge: merge a LoRA adapter into its unquantized base model, even if training used 4-bit weights
        output: directory to write
        overwrite: replace a model that an earlier export wrote to the output
    """

    model: Model = field(default_factory=Model)
    merge: bool = False
    output: Folder | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class CheckConfig:
    """The encoder to check."""

    model: Model = field(default_factory=Model)
