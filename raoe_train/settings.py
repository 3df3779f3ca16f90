"""Sections of settings for evaluation, generation and training. This file, data/settings.py and encoders/settings.py do
not import torch, so that help and shell completion are quick."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from raoe_train.config import (
    AboveZeroToOne,
    AtLeast2,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    Share,
    Source,
    TaskName,
    Unrecorded,
    ZeroToOne,
    nearest,
)
from raoe_train.encoders.settings import FrozenEncoder

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "scikit-learn": {"kfold": 10},
    "senteval": {"kfold": 10, "batch_size": 64, "tenacity": 5, "epoch_size": 4},  # as in SentEval's README for papers
}


@dataclass
class Classifier:
    """The classifier for transfer tasks. The other keys have defaults that depend on classifier.name.

    Args:
        name: scikit-learn (logistic regression), or senteval (SentEval's linear layer, trained with Adam)
        kfold: number of cross-validation folds
        batch_size: examples per training step
        tenacity: number of rounds, in total, that may fail to improve the dev accuracy before training stops
        epoch_size: epochs per round; the dev set is evaluated after each round
    """

    name: str = "scikit-learn"
    kfold: AtLeast2 | None = None
    batch_size: PositiveInt | None = None
    tenacity: NonNegativeInt | None = None
    epoch_size: PositiveInt | None = None

    def settings(self) -> dict[str, Any]:
        """Return the name and all settings. ValueError for an unknown name, or a setting of the other classifier."""
        if self.name not in CLASSIFIERS:
            hint = nearest(self.name, CLASSIFIERS)
            raise ValueError(f"classifier.name must be one of {', '.join(CLASSIFIERS)}, got {self.name!r}{hint}")
        names = CLASSIFIERS[self.name]
        values = {key: value for key, value in vars(self).items() if key != "name" and value is not None}
        if unknown := [key for key in values if key not in names]:
            raise ValueError(f"classifier.{unknown[0]} is not a setting of {self.name}, which has {', '.join(names)}")
        return {"name": self.name, **names, **values}


@dataclass
class Polarity:
    """Settings of polarity tasks (polarity:NAME).

    Args:
        reference: encoder that measures similarity; in the job train, the default is the encoder before training
        k: number of sentences to retrieve for each test sentence
        discount: weights of the retrieved sentences; linear (Eq. 1 of the margins paper: falling with rank) or none
        sources: number of train sentences to retrieve from, as a multiple of the number of test sentences
        max_sentences: maximum number of test sentences, which are sampled at random if there are more
        seed: seed for the random choice of sentences
        curve: additional values of k at which to report scores
    """

    reference: FrozenEncoder | None = None
    k: PositiveInt = 16
    discount: Literal["linear", "none"] = "linear"
    sources: PositiveInt = 5
    max_sentences: PositiveInt | None = None
    seed: Seed = 42
    curve: list[PositiveInt] = field(default_factory=list)


@dataclass
class LanguageModel:
    """The language model that generates chains.

    Args:
        name: causal language model, by path or hub name
        trust_remote_code: run custom code from the model's repository
        revision: branch, tag or commit on the hub
        device: torch device; by default, an accelerator if one is available, else cpu
        dtype: dtype of the weights; by default, the saved dtype
        attention: attention implementation; by default, the choice of transformers
        device_map: device_map of transformers; auto spreads the model over all GPUs
        load_in_4bit: load the weights in 4 bits (NF4); fast only on a GPU
    """

    name: Source = ""
    trust_remote_code: bool = False
    revision: str | None = None
    device: Unrecorded[str | None] = None
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    attention: str | None = None
    device_map: Unrecorded[str | None] = None
    load_in_4bit: bool = False


@dataclass
class Sampling:
    """How tokens are chosen. The fields have the same meaning as in transformers.GenerationConfig.

    Args:
        do_sample: sample tokens at random; false always takes the most probable token (greedy decoding)
        repetition_penalty: penalty for tokens that already occurred; 1 for no penalty
        no_repeat_ngram_size: size of the n-grams that must not occur twice; 0 allows repetitions
        temperature: temperature of the softmax
        top_k: sample only from this many of the most probable tokens
        top_p: sample only from the most probable tokens whose probabilities sum to this value
        eos_token_id: ids of tokens that end an answer; by default, the end tokens of the model
        stop_strings: texts that end an answer
    """

    do_sample: bool = False
    repetition_penalty: PositiveFloat | None = None
    no_repeat_ngram_size: NonNegativeInt | None = None
    temperature: PositiveFloat | None = None
    top_k: NonNegativeInt | None = None
    top_p: AboveZeroToOne | None = None
    eos_token_id: list[NonNegativeInt] | None = None
    stop_strings: list[str] | None = None

    def __post_init__(self) -> None:
        names = [name for name in ("temperature", "top_k", "top_p") if getattr(self, name) is not None]
        if names and not self.do_sample:
            raise ValueError(f"generation.{names[0]} has no effect on greedy decoding: set generation.do_sample true")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings or ()):
            raise ValueError(f"generation.stop_strings must be a list of non-empty texts, got {self.stop_strings!r}")


@dataclass
class Generation(Sampling):
    """How chains are generated.

    Args:
        method: guided, iterative (without guidance) or single-step (one prompt for the whole list)
        steps: number of sentences to generate for each source sentence
        guidance: with method guided, how strongly to move away from the sentence before last; the paper's 1 + lambda
        max_new_tokens: maximum number of tokens per sentence; method single-step allows `steps` times as many per list
        batch_size: number of chains to generate at the same time
        verify: check each sentence against rules; with do_sample, a sentence that fails is generated again up to 5
            times; chains that still fail go to OUTPUT.failed.jsonl; false keeps all chains
        seed: seed for the random choices of do_sample
        prompt: prompt template that replaces the paper's prompt, with {sentence} and optionally {steps} and {example};
            few-shot selects raoe's prompt for small models
        chat: use the tokenizer's chat template; by default, true if the tokenizer has a chat template
        max_input_tokens: maximum number of tokens in a source sentence; longer sentences are skipped and counted
    """

    method: Literal["guided", "iterative", "single-step"] = "guided"
    steps: PositiveInt = 32
    guidance: NonNegativeFloat = 1.5
    max_new_tokens: PositiveInt = 64
    batch_size: Unrecorded[PositiveInt] = 16
    verify: bool = True
    seed: NonNegativeInt = 42
    prompt: str | None = None
    chat: bool | None = None
    max_input_tokens: PositiveInt = 128

    def effective(self) -> dict[str, Any]:
        """Return the settings that affect the generated chains, as plain values."""
        names = ("method", "steps", "guidance", "max_new_tokens", "verify", "seed")
        values = {name: getattr(self, name) for name in names}
        if self.method != "guided":
            values["guidance"] = 1.0
        sampling = {each.name: getattr(self, each.name) for each in fields(Sampling)}
        return values | {name: value for name, value in sampling.items() if value not in (None, False)}


@dataclass
class Teacher(FrozenEncoder):
    """The frozen encoder that supplies a loss's targets.

    Args:
        cache: directory in which the teacher's embeddings (for lists, cosines) are cached for later runs; for lists,
            the default is OUTPUT/teacher, which is removed when the run finishes
        information: what to learn from a list; ranking (its order), semantic (the teacher's cosines) or both
        omega: with information both, how strongly the order of a list changes the teacher's cosines
        second: second teacher, whose cosines are averaged with those of the first teacher
    """

    information: Literal["both", "ranking", "semantic"] = "both"
    omega: NonNegativeFloat = 0.5
    second: FrozenEncoder | None = None


@dataclass
class Training:
    """How to train; every other field of SentenceTransformerTrainingArguments is also a key here.

    Args:
        num_train_epochs: number of passes over the training data
        per_device_train_batch_size: rows in a training batch, on each device
        learning_rate: peak learning rate; auto is 2e-5 for queries and passages, 5e-5 above 50M parameters, else 2e-4
        warmup_ratio: share of steps used for warm-up
        seed: seed for shuffling, sampling and new weights
        bf16: train in bfloat16; auto uses bfloat16 if the device has bfloat16 units; by default, as auto for weights
            saved in 16 bits, else false
        tf32: multiply float32 matrices in TF32; auto uses TF32 on GPUs that support it
        by_length: encode each batch in groups of texts of similar length, which reduces padding
        packed: join a batch's texts into one row without padding (uses raoe_kernels' attention); auto packs on CUDA
        keep: weight of the regularizer that keeps embeddings close to those before training; auto is 0.3 for
            queries and passages, and if the training scores have only two values; else 0
        patience: number of evaluations without improvement after which training stops
        min_steps: minimum number of steps; epochs are added if needed
        max_steps: number of steps; overrides num_train_epochs
        per_device_eval_batch_size: rows in an evaluation batch, on each device
        gradient_accumulation_steps: batches per optimizer step; unlike a larger batch with loss.mini_batch_size, this
            adds no in-batch negatives
        warmup_steps: number of warm-up steps; a number below 1 is a share of all steps
        weight_decay: weight decay of AdamW
        max_grad_norm: maximum gradient norm; gradients with a larger norm are scaled down; 0 turns clipping off
        fp16: train in float16 with loss scaling
        eval_strategy: when to evaluate; by default, after each epoch if there is a dev set
        eval_steps: steps between evaluations; a number below 1 is a share of all steps
        save_strategy: when to write checkpoints; by default, after each evaluation
        save_steps: steps between checkpoints; by default, the value of eval_steps
        save_total_limit: maximum number of checkpoints to keep
        logging_steps: steps between log entries
        report_to: experiment trackers, such as tensorboard or wandb
        dataloader_num_workers: processes that prepare batches; by default 4 on CUDA, else 0
        batch_sampler: how batches are drawn, or the import path of a batch sampler class
        gradient_checkpointing: save memory by recomputing activations in the backward pass
        learning_rate_mapping: learning rates for parameters whose names match a regular expression, as REGEX=RATE
    """

    num_train_epochs: PositiveFloat = 3.0
    per_device_train_batch_size: PositiveInt = 8
    learning_rate: PositiveFloat | Literal["auto"] = 5e-5
    warmup_ratio: Share | None = None
    seed: Seed = 42
    bf16: bool | Literal["auto"] | None = None
    tf32: bool | Literal["auto"] | None = None
    by_length: bool = True
    packed: bool | Literal["auto"] = "auto"
    keep: NonNegativeFloat | Literal["auto"] = 0.0
    patience: PositiveInt | None = None
    min_steps: NonNegativeInt = 0
    max_steps: PositiveInt | None = None
    per_device_eval_batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    warmup_steps: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: NonNegativeFloat = 1.0
    fp16: bool = False
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    eval_steps: PositiveFloat | None = None
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    save_steps: PositiveFloat | None = None
    save_total_limit: PositiveInt | None = 2
    logging_steps: PositiveFloat = 10.0
    report_to: Unrecorded[str | list[str]] = "none"
    dataloader_num_workers: Unrecorded[NonNegativeInt | None] = None
    batch_sampler: str | None = None
    gradient_checkpointing: bool = False
    learning_rate_mapping: dict[str, NonNegativeFloat] | None = None
    others: dict[str, Any] = field(default_factory=dict)


@dataclass
class Evaluation:
    """What to evaluate before and after training.

    Args:
        tasks: evaluation tasks, named as in the job evaluate; data.dir is the directory to look up names in
        before: also run the evaluation tasks before training
        batch_size: sentences encoded at a time
        classifier: classifier for transfer tasks
        certificate: save a trained encoder only if a paired bootstrap on the dev set finds it better than the encoder
            before training; otherwise save the encoder before training
        mixtures: with certificate, also try the weights x * trained + (1 - x) * before training, for these values of x
        min_gain: with certificate, save the candidate with the best guard score among those that reach this share of
            the largest dev gain; 1 saves the candidate with the largest gain
        guard_budget: with certificate, maximum decrease of the guard score (correlation x 100 on data.guard)
    """

    tasks: list[TaskName] = field(default_factory=list)
    before: bool = True
    batch_size: Unrecorded[PositiveInt] = 64
    classifier: Classifier | None = None
    certificate: bool = False
    mixtures: list[AboveZeroToOne] = field(default_factory=lambda: [0.7, 0.6, 0.5, 0.4])
    min_gain: ZeroToOne = 0.9
    guard_budget: NonNegativeFloat = 30.0
