"""Configuration classes of the jobs. This file does not import torch, so that help and shell completion are quick."""

import ast
import contextlib
import functools
import importlib.util
import inspect
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from raoe_train import settings
from raoe_train.config import (
    OTHERS,
    Choice,
    Cosine,
    File,
    Folder,
    Key,
    NonNegativeInt,
    PositiveInt,
    RecordFile,
    Seed,
    Share,
    Source,
    Suite,
    TaskName,
    Unrecorded,
    convert,
    hints_of,
    keywords_of,
    nearest,
)
from raoe_train.data.settings import Data, Input, Pairs, Sentences, Tasks
from raoe_train.encoders.settings import FrozenEncoder, Model

# Training arguments that are not settings: output_dir is OUTPUT/checkpoints, and torchrun sets local_rank
NOT_TAKEN = (OTHERS, "output_dir", "local_rank")
ARGUMENTS = (("transformers", "training_args.py"), ("sentence_transformers", "base/training_args.py"),
             ("sentence_transformers", "sentence_transformer/training_args.py"))  # fmt: skip
BASES = ("Loss", "CachedLoss", "PairLoss", "InBatchLoss")  # abstract base classes
NO_KEYS = ("self", "model", "embed", "similarity_fct")  # constructor arguments of losses that are not settings


@dataclass
class Mining:
    """How to mine examples. k, threshold, drop and count are for labelled texts; corpus and the settings after it are
    for rows of queries and passages.

    Args:
        k: number of nearest neighbours to find in a sentence's own class, and again in all other classes together
        threshold: cosine that a sentence and its neighbour must exceed
        drop: share of all examples to drop at random
        count: maximum number of examples, drawn at random
        seed: seed for the random choice of examples
        corpus: file of additional passages to mine from, with columns text and, optionally, title
        range_min: number of most similar passages to skip for each query, of those that margins and max_score allow
        range_max: number of most similar passages to consider for each query; by default range_min + num_negatives or,
            with max_score or a margin, range_min + 10 x num_negatives, plus the largest number of positives
        max_score: maximum similarity of a negative to the query
        absolute_margin: minimum of similarity(query, its least similar positive) - similarity(query, negative)
        relative_margin: minimum share by which a negative is less similar to the query than its least similar positive
        num_negatives: number of negatives to mine per row
        keep_negatives: keep the negatives of the input, before the mined ones, instead of replacing them
        sampling_strategy: how to select negatives; top (the most similar passages) or random
        cross_encoder: CrossEncoder, by path or hub name, whose scores replace similarities for margins and max_score
    """

    k: PositiveInt = 16
    threshold: Cosine = 0.5
    drop: Share = 0.0
    count: PositiveInt | None = None
    seed: Seed = 42
    corpus: Source | None = None
    range_min: NonNegativeInt = 0
    range_max: PositiveInt | None = None
    max_score: float | None = None
    absolute_margin: float | None = None
    relative_margin: float | None = None
    num_negatives: PositiveInt = 3
    keep_negatives: bool = False
    sampling_strategy: Literal["top", "random"] = "top"
    cross_encoder: Source | None = None


@dataclass
class TrainConfig:
    """The loss, output and mode of a training run.

    Args:
        loss: class of raoe_train.losses, or import path of your own class; --loss.ARGUMENT VALUE sets an argument
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
    data: Data = field(default_factory=Data)
    teacher: settings.Teacher = field(default_factory=settings.Teacher)
    loss: Choice = field(default_factory=lambda: Choice("raoe_train.losses.RAOELoss"))
    training: settings.Training = field(default_factory=settings.Training)
    evaluation: settings.Evaluation = field(default_factory=settings.Evaluation)
    polarity: settings.Polarity = field(default_factory=settings.Polarity)
    output: Folder | None = None
    overwrite: Unrecorded[bool] = False
    dry_run: Unrecorded[bool] = False

    @property
    def needs_library(self) -> bool:
        """Whether `complete` must import torch to check these settings."""
        return self.loss != type(self)().loss or bool(self.training.others)

    def complete(self) -> "TrainConfig":
        """Check the loss, its keywords and the training arguments of sentence-transformers. Return settings with the
        defaults of all keywords. Checks that do not import torch run first."""
        path, given, others = self.loss.class_path, self.loss.init_args, self.training.others
        outline, name = loss_outline(), path.removeprefix("raoe_train.losses.")
        names = outline[name] if name in outline else [*loss_keywords(loss_class(path))]
        if unknown := given.keys() - names:
            hint = nearest(min(unknown), names)
            name = name.rpartition(".")[2]
            advice = f"--loss.help {name} lists its keywords" if names else "first set --loss to a class"
            raise ValueError(f"unknown key loss.{min(unknown)}{hint}: {advice}")
        known = [f"training.{each}" for each in training_fields() if each not in NOT_TAKEN] if others else []
        if wrong := [f"training.{each}" for each in others if f"training.{each}" not in known]:
            raise ValueError(f"unknown key {wrong[0]}{nearest(wrong[0], known)}")
        keywords = loss_keywords(loss_class(path))
        values = {name: key.default for name, key in keywords.items()} | given
        init_args = {name: convert(f"loss.{name}", value, keywords[name].type) for name, value in values.items()}
        others = {each: convert(f"training.{each}", value, Any) for each, value in others.items()}
        path = path if "." in path else f"raoe_train.losses.{path}"
        return replace(self, loss=Choice(path, init_args), training=replace(self.training, others=others))


def training_fields() -> list[str]:
    """Return the keys of the section `training`. Read source files, because importing the libraries takes seconds."""
    names = [*hints_of(settings.Training)]
    try:
        for package, file in ARGUMENTS:
            spec: Any = importlib.util.find_spec(package) or importlib.import_module(package)
            text = Path(spec.origin).parent.joinpath(file).read_text(encoding="utf-8")
            names += re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE)
    except OSError:  # a library version with other file names
        from sentence_transformers import SentenceTransformerTrainingArguments

        names += [each.name for each in fields(SentenceTransformerTrainingArguments)]
    return names


@functools.cache
def loss_outline() -> dict[str, list[str]]:
    """Return {loss: its keywords}. Read source files, because importing raoe_train.losses takes seconds."""
    files = Path(settings.__file__).with_name("losses").glob("*.py")
    nodes = [node for file in files for node in ast.parse(file.read_bytes()).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}

    def keywords(name: str) -> list[str]:
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
        names = [each for base in bases for each in keywords(base)]
        for node in classes[name].body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                own = [each.arg for each in node.args.args + node.args.kwonlyargs if each.arg not in NO_KEYS]
                return [*own, *names] if node.args.kwarg else own
        return names

    return {name: keywords(name) for name in classes if name.endswith("Loss") and name not in BASES}


def loss_class(name: str) -> Any:
    """Return the class of a loss by its name in raoe_train.losses, or by its import path. ValueError if none exists."""
    module, _, attribute = name.rpartition(".")
    loss, known = None, loss_outline()
    if module not in ("", "raoe_train.losses") or attribute in known:
        from raoe_train.losses import Loss

        with contextlib.suppress(ImportError, AttributeError, ValueError, TypeError):
            found = getattr(importlib.import_module(module or "raoe_train.losses"), attribute)
            loss = found if issubclass(found, Loss) and not inspect.isabstract(found) else None
    if loss is None:
        hint = nearest(attribute, known)
        raise ValueError(f"loss must be the name of a class, got {name}{hint}: --loss.help lists the known losses")
    return loss


def loss_keywords(loss: Any) -> dict[str, Key]:
    """Return the constructor keywords of a loss that users can set."""
    return {name: key for name, key in keywords_of(loss).items() if name not in NO_KEYS}


@dataclass
class PrepareConfig:
    """The public data sets to prepare.

    Args:
        names: names of data sets or papers; a paper (raoe, bellm, ranking, margins) means all of its sets
        copies: directory with earlier downloads; publishers' files, SentEval's folders, or hub data sets as OWNER/NAME
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
    """The teachers and the output of scoring.

    Args:
        teachers: two encoders, by path or hub name; by default, the two teachers of the RAOE paper
        teacher: settings of individual teachers, such as {NAME: {prompt: 'query: ', task: text-matching}}
        trust_remote_code: run custom code from the teachers' repositories; the default teachers need this
        batch_size: sentences in a batch
        device: torch device; by default, an accelerator if there is one, else cpu
        output: file to write
        overwrite: replace an output that was made with other settings
    """

    data: Pairs = field(default_factory=Pairs)
    teachers: list[Source] = field(default_factory=list)
    teacher: dict[str, dict[str, Any]] = field(default_factory=dict)
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
    data: Input = field(default_factory=Input)
    loss: Literal["triplet", "contrastive", "online_contrastive", "multiple_negatives", "mse"] = "triplet"
    mining: Mining = field(default_factory=Mining)
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
    data: Sentences = field(default_factory=Sentences)
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
        batch_size: sentences in a batch
        truncate_dim: use only this many leading dimensions of the embeddings; by default, all
        output: JSON file to write
        overwrite: replace an output that was made with other settings
    """

    model: Model = field(default_factory=Model)
    tasks: list[TaskName] = field(default_factory=list)
    data: Tasks = field(default_factory=Tasks)
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
        batch_size: sentences in a batch
        output: .npy file to write
        overwrite: replace an output that was made with other settings
    """

    model: Model = field(default_factory=Model)
    data: Input = field(default_factory=Input)
    batch_size: Unrecorded[PositiveInt] = 64
    output: File | None = None
    overwrite: Unrecorded[bool] = False


@dataclass
class ExportConfig:
    """The output of an export.

    Args:
        merge: merge a LoRA adapter into its base model, which is not quantized even if training used 4-bit weights
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
