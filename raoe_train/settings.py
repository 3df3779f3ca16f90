"""Recipe sections, as dataclasses. This file does not import torch, so that help and shell completion are fast."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from raoe_train.config import (
    AboveZeroToOne,
    Anything,
    AtLeast2,
    Cosine,
    DataSource,
    Folder,
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

SCRATCH = "scratch"  # value of model.name for a new model
CONDITIONAL = "conditional"  # name of the prompt with {condition} in a model's `prompts`
# {kind of text: names that its prompt can have}, as in sentence-transformers' encode_query and encode_document
PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}
Pooling = Literal["mean", "weighted_mean", "cls", "max", "last"]
Dtype = Literal["float32", "bfloat16", "float16"]
# {classifier: its settings}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "scikit-learn": {"kfold": 10},
    "senteval": {"kfold": 10, "batch_size": 64, "tenacity": 5, "epoch_size": 4},  # as in SentEval's README for papers
}


@dataclass
class Encoder:
    """An encoder to load, and how it embeds texts.

    Args:
        name: encoder or SentenceTransformer, by path or hub name
        pooling: pooling of token states; by default, the saved pooling; without a saved pooling,
            cls for ModernBERT and SimCSE models, and mean for all other models
        prompt: template for every text, such as 'query: {text}'; saved with the model
        max_seq_length: maximum number of tokens; longer texts are truncated
        trust_remote_code: run custom code from the model's repository
        revision: branch, tag or commit on the hub
        attention: attention implementation, such as raoe_packed; by default, chosen by
            transformers
        device: torch device; by default, an accelerator if there is one, else cpu
    """

    name: Source | None = None
    pooling: Pooling | None = None
    prompt: str | None = None
    max_seq_length: PositiveInt | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    attention: str | None = None
    device: Unrecorded[str | None] = None


@dataclass
class FrozenEncoder(Encoder):
    """An encoder that is used but not trained, such as a teacher or a reference.

    Args:
        prompt: template for every text, such as 'query: {text}'; a prompt without {text} is added
            before each text
        task: argument `task` of the encoder's encode method, such as text-matching for
            jina-embeddings-v3
        batch_size: sentences to encode at a time
        cache: directory in which embeddings are cached for later runs
    """

    task: str | None = None
    batch_size: Unrecorded[PositiveInt] = 64
    cache: Folder | None = None


@dataclass
class Model(Encoder):
    """An encoder to load, and how to change it before training.

    Args:
        name: encoder or SentenceTransformer, by path or hub name; scratch makes a new model
        dtype: dtype of the weights; by default, the saved dtype
        device_map: device_map of transformers; auto spreads the model over all GPUs
        bidirectional_layers: how many of a decoder's last layers attend in both directions; a number
            or all
        load_in_4bit: load a decoder's weights in 4 bits (QLoRA's NF4); fast only on a GPU; by default,
            true only for the base model of an adapter that was trained on 4-bit weights
        lora: train a LoRA adapter with these fields of peft.LoraConfig, such as r
        training_head: during training, add SimCSE's linear layer and tanh on top of the embedding
        scratch: fields of transformers.BertConfig for the new model if model.name is scratch
    """

    name: Source = ""
    dtype: Dtype | None = None
    device_map: Unrecorded[str | None] = None
    bidirectional_layers: NonNegativeInt | Literal["all"] | None = None
    load_in_4bit: bool | None = None
    lora: dict[str, Anything] = field(default_factory=dict)
    training_head: bool = False
    scratch: dict[str, Anything] = field(default_factory=dict)


@dataclass
class Rows:
    """How to read rows.

    Args:
        columns: column names in your files, as OUR_NAME=YOUR_NAME ...
        on_error: what to do with a malformed row; raise (stop with an error) or skip (skip and
            count the row)
    """

    columns: dict[str, str | None] = field(default_factory=dict)
    on_error: Literal["raise", "skip"] = "raise"


@dataclass
class Input(Rows):
    """Data to read.

    Args:
        input: data to read; FILE, FILE#SPLIT, builtin#SPLIT or hub:OWNER/NAME#SPLIT
    """

    input: DataSource | None = None


@dataclass
class Pairs(Input):
    """Pairs to read.

    Args:
        labels: class of each label, as LABEL=CLASS ...; a larger class means less related
    """

    labels: dict[str, Anything] | None = None


@dataclass
class Sentences(Input):
    """Sentences to read.

    Args:
        max_rows: maximum number of rows to use
    """

    max_rows: PositiveInt | None = None


@dataclass
class Tasks(Rows):
    """Data for evaluation.

    Args:
        dir: directory where evaluation tasks are looked up by name, as NAME.* or KIND/NAME.*
    """

    dir: Unrecorded[Source | None] = None


@dataclass
class Data(Tasks):
    """What to train on.

    Args:
        train: training sources (FILE, FILE#SPLIT, builtin#train, hub name); each batch comes from
            one source, or from one pool A+B
        labels: class of each label (larger = less related; null skips rows), or {FILE NAME: {LABEL:
            CLASS}}
        dev: sources of the dev set (for rows, also folders in BEIR's layout, whose queries search
            the folder's whole corpus); the checkpoint with the best dev score is saved
        dev_corpus: additional passages (_id, title, text) for the queries in data.dev to search
        guard: with evaluation.certificate, texts or scored pairs whose similarities must stay close
            to their values before training; by default, random words from the encoder's vocabulary
        dev_share: share of the first training source to hold out as a dev set, if data.dev is not
            set; auto holds out a tenth, or 200 rows if a tenth is less, but at most three tenths;
            with evaluation.certificate and 100 to 1,999 rows, auto trains 5 encoders, holds out a
            different fifth for each, and saves the mean of their weights
        score_scale: lowest and highest possible score in data.train; two numbers, or two numbers
            per source
        max_rows: maximum number of rows from each source, drawn at random with training.seed
        redraw: draw a new random sample of max_rows rows in each epoch
        pairing: triplets to build for each NLI premise; one, zip (i-th entailed with i-th
            contradicting hypothesis) or all (every combination)
        neutral: also use a neutral hypothesis for each NLI premise, as a second hard negative
        num_negatives: maximum number of negatives per row, which are drawn at random if there are
            more
    """

    train: list[DataSource] = field(default_factory=list)
    labels: dict[str, Anything] | None = None
    dev: list[DataSource] | None = None
    dev_corpus: Source | None = None
    guard: list[DataSource] = field(default_factory=list)
    dev_share: Share | Literal["auto"] = 0.0
    score_scale: list[float] = field(default_factory=list)
    max_rows: PositiveInt | None = None
    redraw: bool = False
    pairing: Literal["one", "zip", "all"] = "one"
    neutral: bool = False
    num_negatives: NonNegativeInt | None = None


@dataclass
class Mining:
    """How to mine examples. The settings k, threshold, drop and count apply to labelled texts. The settings from corpus
    to use_faiss apply to rows of queries and passages.

    Args:
        k: number of nearest neighbours to find in a sentence's own class, and the same number in all
            other classes combined
        threshold: cosine that a sentence and its neighbour must exceed
        drop: share of all examples to drop at random
        count: maximum number of examples, drawn at random
        seed: seed for the random choice of examples
        corpus: file of additional passages to mine from, with columns text and, optionally, title
        range_min: number of most similar passages to skip for each query, among those that the
            margins and max_score allow
        range_max: number of most similar passages to consider for each query; by default, range_min
            + the largest number of positives of a query + num_negatives (10 x num_negatives with
            max_score or a margin)
        max_score: maximum similarity of a negative to the query
        absolute_margin: minimum value of similarity(query, its least similar positive) -
            similarity(query, negative)
        relative_margin: minimum share by which a negative must be less similar to the query than
            the query's least similar positive is
        num_negatives: number of negatives to mine per row
        keep_negatives: keep the negatives of the input, before the mined ones, instead of replacing
            them
        sampling_strategy: how to select negatives; top (the most similar passages) or random
        cross_encoder: CrossEncoder, by path or hub name, whose scores replace similarities for
            margins and max_score
        use_faiss: search with the package faiss, on all GPUs if faiss supports them
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
    use_faiss: bool = False


@dataclass
class Classifier:
    """The classifier for transfer tasks. The defaults of the other settings depend on classifier.name.

    Args:
        name: scikit-learn (logistic regression), or senteval (SentEval's linear layer, trained with
            Adam)
        kfold: number of cross-validation folds
        batch_size: examples per training step
        tenacity: total number of rounds that may fail to improve the dev accuracy before training
            stops
        epoch_size: epochs per round; the dev set is evaluated after each round
    """

    name: str = "scikit-learn"
    kfold: AtLeast2 | None = None
    batch_size: PositiveInt | None = None
    tenacity: NonNegativeInt | None = None
    epoch_size: PositiveInt | None = None

    def settings(self) -> dict[str, Any]:
        """Return the classifier's name and settings. Raise ValueError for unknown names and settings."""
        if self.name not in CLASSIFIERS:
            hint = nearest(self.name, CLASSIFIERS)
            raise ValueError(f"classifier.name must be one of {', '.join(CLASSIFIERS)}, got {self.name!r}{hint}")
        names = CLASSIFIERS[self.name]
        values = {key: value for key, value in vars(self).items() if key != "name" and value is not None}
        if unknown := [key for key in values if key not in names]:
            raise ValueError(f"classifier.{unknown[0]} is not a setting of {self.name}; settings: {', '.join(names)}")
        return {"name": self.name, **names, **values}


@dataclass
class Polarity:
    """Settings of polarity tasks (polarity:NAME).

    Args:
        reference: encoder that measures similarity; in the job train, the default is the encoder
            before training
        k: number of sentences to retrieve for each test sentence
        discount: how to weight the retrieved sentences; linear (weights fall with rank, as in Eq. 1
            of the margins paper) or none
        sources: number of training sentences to retrieve from, as a multiple of the number of test
            sentences
        max_sentences: maximum number of test sentences, which are sampled at random if there are
            more
        seed: seed for the random choice of sentences
    """

    reference: FrozenEncoder | None = None
    k: PositiveInt = 16
    discount: Literal["linear", "none"] = "linear"
    sources: PositiveInt = 5
    max_sentences: PositiveInt | None = None
    seed: Seed = 42


@dataclass
class LanguageModel:
    """The language model that generates chains.

    Args:
        name: causal language model, by path or hub name
        trust_remote_code: run custom code from the model's repository
        revision: branch, tag or commit on the hub
        device: torch device; by default, an accelerator if one is available, else cpu
        dtype: dtype of the weights; by default, the saved dtype
        attention: attention implementation; by default, chosen by transformers
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
        do_sample: sample tokens at random; false always takes the most probable token (greedy
            decoding)
        repetition_penalty: penalty for tokens that already occurred; 1 for no penalty
        no_repeat_ngram_size: size of the n-grams that must not occur twice; 0 allows repetitions
        temperature: temperature of the softmax
        top_k: sample only from this many of the most probable tokens
        top_p: sample only from the most probable tokens whose probabilities add up to this value
        eos_token_id: ids of tokens that end an answer; by default, the model's end tokens
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
            raise ValueError(f"generation.stop_strings must be a list of non-empty strings, got {self.stop_strings!r}")


@dataclass
class Generation(Sampling):
    """How chains are generated.

    Args:
        method: guided, iterative (without guidance) or single-step (one prompt for the whole list)
        steps: number of sentences to generate for each source sentence
        guidance: with method guided, how strongly to move away from the sentence before last; the
            paper's 1 + lambda
        max_new_tokens: maximum number of tokens per sentence; method single-step allows `steps`
            times as many tokens per list
        batch_size: number of chains to generate at the same time
        verify: check each sentence against rules; with do_sample, a sentence that fails is
            generated again up to 5 times; chains that still fail go to OUTPUT.failed.jsonl; false
            keeps all chains
        seed: seed for the random choices of do_sample
        prompt: prompt template that replaces the paper's prompt, with {sentence} and optionally
            {steps} and {example}; few-shot selects raoe's prompt for small models
        chat: use the tokenizer's chat template; by default, true if the tokenizer has a chat
            template
        max_input_tokens: maximum number of tokens in a source sentence; longer sentences are
            skipped and counted
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
    """The frozen encoder that supplies the targets of a loss.

    Args:
        cache: directory in which the teacher's embeddings (for lists, cosines) are cached for later
            runs; for lists, the default is OUTPUT/teacher, which is removed when the run finishes
        information: what to learn from a list; ranking (its order), semantic (the teacher's
            cosines) or both
        omega: with information both, how strongly the order of a list changes the teacher's cosines
        second: second teacher, whose cosines are averaged with those of the first teacher
    """

    information: Literal["both", "ranking", "semantic"] = "both"
    omega: NonNegativeFloat = 0.5
    second: FrozenEncoder | None = None


@dataclass
class Training:
    """How to train. All other fields of SentenceTransformerTrainingArguments are also accepted as settings.

    Args:
        num_train_epochs: number of passes over the training data
        per_device_train_batch_size: rows in a training batch, on each device
        learning_rate: peak learning rate; auto is 2e-4 for an adapter, otherwise 2e-5 for queries and
            passages, 5e-5 for encoders with more than 50M parameters, else 2e-4
        warmup_ratio: share of steps used for warm-up
        seed: seed for shuffling, sampling and new weights
        bf16: train in bfloat16; auto uses bfloat16 if the device has bfloat16 units; by default,
            auto for weights saved in a 16-bit dtype, else false
        tf32: multiply float32 matrices in TF32; auto uses TF32 on GPUs that support it
        by_length: encode each batch in groups of texts of similar length, which reduces padding
        packed: join a batch's texts into one row without padding (uses raoe_kernels' attention);
            auto packs on CUDA
        keep: weight of the regularizer that keeps embeddings close to their values before training;
            auto is 0.3 for queries and passages and for scores with only two values, otherwise 0
        pretokenize: tokenize all training texts before the first step; auto does so for data of up
            to 256 MiB if the run reads all of the data
        patience: number of evaluations without improvement after which training stops
        min_steps: minimum number of steps; epochs are added if needed
        max_steps: number of steps; overrides num_train_epochs
        gradient_accumulation_steps: batches per optimizer step; unlike a larger batch with
            loss.mini_batch_size, this adds no in-batch negatives
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
        learning_rate_mapping: learning rates for parameters whose names match a regular expression,
            as REGEX=RATE
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
    pretokenize: Unrecorded[bool | Literal["auto"]] = "auto"
    patience: PositiveInt | None = None
    min_steps: NonNegativeInt = 0
    max_steps: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt = 1
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
        tasks: evaluation tasks, named as in the job evaluate; data.dir is the directory in which to
            look up names
        before: also run the evaluation tasks before training
        batch_size: sentences to encode at a time
        classifier: classifier for transfer tasks
        certificate: save a trained encoder only if a paired bootstrap on the dev set finds it
            significantly better than the encoder before training; otherwise, save the encoder before
            training, and save the best rejected encoder in OUTPUT/rejected; auto does so if there is
            a dev set
        mixtures: with certificate, also try the weights x * trained + (1 - x) * before training,
            for these values of x
        min_gain: with certificate, save the candidate with the best guard score among those that
            reach this share of the largest dev gain; 1 saves the candidate with the largest gain
        guard_budget: with certificate, maximum decrease of the guard score (correlation x 100 on
            data.guard)
    """

    tasks: list[TaskName] = field(default_factory=list)
    before: bool = True
    batch_size: Unrecorded[PositiveInt] = 64
    classifier: Classifier | None = None
    certificate: bool | Literal["auto"] = False
    mixtures: list[AboveZeroToOne] = field(default_factory=lambda: [0.7, 0.6, 0.5, 0.4])
    min_gain: ZeroToOne = 0.9
    guard_budget: NonNegativeFloat = 30.0
