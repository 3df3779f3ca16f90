"""One dataclass a job: what its recipe may say, with defaults and a line of help each."""

# ruff: noqa: RUF009 - _field is dataclasses.field with less to type

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any


def _field(default: Any, help: str) -> Any:
    if isinstance(default, (list, dict)) or (isinstance(default, type) and dataclasses.is_dataclass(default)):
        factory = default if isinstance(default, type) else lambda: type(default)(default)
        return dataclasses.field(default_factory=factory, metadata={"help": help})
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class ScratchConfig:
    """A small model with random weights, and a tokenizer trained on the training sentences."""

    architecture: str = _field("bert", "bert, with WordPiece, or llama, with byte-level BPE")
    vocab_size: int = _field(4000, "most entries of the vocabulary")
    hidden_size: int = _field(128, "width")
    layers: int = _field(2, "transformer layers")
    heads: int = _field(4, "attention heads")
    intermediate_size: int = _field(256, "width of the feed-forward part")
    dropout: float = _field(0.1, "dropout of hidden states and attention")
    seed: int = _field(42, "seed of the random weights")


@dataclass
class ModelConfig:
    """Which encoder, and how its tokens become one vector."""

    name: str = _field("bert-base-uncased", "encoder or SentenceTransformer, by name or path; scratch makes one")
    pooling: str | None = _field(
        None, "mean, weighted_mean, cls, max or last [as saved; else cls for ModernBERT, mean for others]"
    )
    prompt: str | None = _field(None, "text around every {text}, saved with the model: 'query: {text}'")
    max_seq_length: int | None = _field(None, "longer sentences are cut to this many tokens")
    trust_remote_code: bool = _field(False, "run code that comes with the model")
    revision: str | None = _field(None, "branch, tag or commit on the hub")
    device: str | None = _field(None, "torch device; by default the best there is")
    random_weights: bool = _field(False, "keep architecture and tokenizer, draw new weights (training.seed)")
    dropout: float | None = _field(None, "override the encoder's dropout probabilities")
    dtype: str | None = _field(None, "of the weights: float32, bfloat16 or float16 [as saved]")
    attention: str | None = _field(None, "eager, sdpa or flex_attention [transformers' choice]")
    bidirectional_layers: Any = _field(None, "so many of a decoder's last layers look both ways, or 'all' [as saved]")
    bidirectional_mode: str = _field(
        "modify", "modify lifts their mask, sum adds causal and bidirectional output, add puts new layers on top"
    )
    load_in_4bit: bool = _field(False, "a decoder's weights in 4 bits (QLoRA's NF4); needs a GPU to be fast")
    lora: dict[str, Any] = _field({}, "train a LoRA adapter: keys of peft.LoraConfig (target_modules: all-linear)")
    scratch: ScratchConfig = _field(ScratchConfig, "the encoder that name 'scratch' makes")


@dataclass
class DataConfig:
    """Where sentence pairs come from."""

    train: list[str] = _field(
        [], "sources of pairs (FILE, FILE#split, builtin#train, builtin-nli#train, hub name); no batch mixes them"
    )
    dev: str | None = _field(None, "source of development pairs; the encoder best on them is kept")
    input: str | None = _field(None, "source to score, to encode or to begin chains with")
    dir: str | None = _field(
        None, "directory where tasks are looked up as NAME.*, KIND/NAME.* or */NAME.*, or in SentEval's folders"
    )
    columns: dict[str, Any] = _field({}, "our column name: its name in the file")
    labels: dict[str, Any] | None = _field(
        None, "word: class (larger = less related, null leaves rows out); or such a map a file by its name, sick: {…}"
    )
    score_scale: list[float] = _field([], "lowest and highest score in data.train; two numbers, or two a source")
    on_error: str = _field("raise", "a malformed row: raise, or skip (and count)")
    pairing: str = _field("one", "triplets of an NLI premise (infonce): one, zip (i-th with i-th) or all combinations")
    neutral: bool = _field(False, "a neutral hypothesis as second hard negative (infonce, angle_contrastive)")
    shuffle_lists: bool = _field(False, "shuffle each list's sentences with training.seed, an ablation (listmle)")
    max_rows: int | None = _field(None, "at most so many rows of each training source, drawn with training.seed")
    cache_dir: str | None = _field(None, "directory that keeps training rows and their tokens, read from disk [memory]")


@dataclass
class TeacherConfig:
    """The frozen encoder whose similarities order the sentences of a list, or are learned as they are."""

    name: str | None = _field(None, "encoder or SentenceTransformer, by name or path")
    pooling: str | None = _field(None, "as model.pooling; cls for DiffCSE, which is saved without it")
    prompt: str | None = _field(None, "text around every {text}")
    max_seq_length: int | None = _field(None, "longer sentences are cut to this many tokens")
    trust_remote_code: bool = _field(False, "run code that comes with the model")
    revision: str | None = _field(None, "branch, tag or commit on the hub")
    device: str | None = _field(None, "torch device; by default the best there is")
    batch_size: int = _field(64, "sentences at a time")
    information: str = _field(
        "both", "what a list teaches: both, ranking (its order alone) or semantic (similarities alone)"
    )
    omega: float = _field(0.5, "how far similarities are moved towards the list's order (information both)")
    cache: str | None = _field(None, "directory that keeps similarities for other runs [OUTPUT/teacher, until the end]")


@dataclass
class LossConfig:
    """The objective. A default of None means: the loss class's own."""

    name: str = _field(
        "raoe",
        "raoe, rank_margin, gated_angular, cosent, angle, mse; infonce, angle_contrastive, triplet; contrastive, "
        "online_contrastive; multiple_negatives, similarity_distillation, rank_distillation; listmle; causal_lm "
        "pretrains a decoder",
    )
    scale: Any = _field(
        20.0, "tau: cosines (or angles) are multiplied by it; 'auto' fits it to encoder and scores, by source"
    )
    margin: float | None = _field(
        None, "rank margin I (raoe, rank_margin; 2 by default), or distance (triplet 5, the contrastive ones 0.5)"
    )
    distance: str | None = _field(
        None, "cosine or euclidean (triplet, euclidean by default; contrastive, online_contrastive)"
    )
    ties: str | None = _field(
        None, "ranks of equal scores: average, min, max, dense, ordinal; of the teacher's (listmle): ordinal, random"
    )
    gate: str | None = _field(None, "label+score, score or label (raoe, gated_angular)")
    rank_weight: float | None = _field(None, "weight of the rank part (raoe); 1 by default")
    angle_weight: float | None = _field(None, "weight of the angular part (raoe, angle_contrastive); 1 by default")
    symmetric: bool | None = _field(None, "positives are to find their anchors, too (infonce, angle_contrastive)")
    mask_duplicates: bool | None = _field(None, "equal texts are no negatives of each other (as symmetric) [true]")
    mini_batch_size: int | None = _field(None, "encode so many pairs at a time (gradient caching); same gradient")
    gather_across_devices: bool = _field(False, "rank over the batches of all processes together")
    matryoshka_dims: list[int] = _field([], "also train the first so many dimensions")


@dataclass
class EvaluationConfig:
    """What to evaluate before and after training."""

    tasks: list[str] = _field([], "tasks of any kind, as of the job evaluate, looked up in data.dir")
    before: bool = _field(True, "evaluate them before training, too")
    batch_size: int = _field(64, "sentences at a time")


@dataclass
class PolarityConfig:
    """How the tasks polarity:NAME score what an encoder retrieves."""

    reference: str | None = _field(None, "frozen encoder that says how alike sentences are [train: model.name]")
    k: int = _field(16, "sentences that are retrieved")
    discount: str = _field("linear", "weights of the k: linear (Eq. 1) or none")
    sources: int = _field(5, "sentences to retrieve from, drawn from train: so many times those of test")
    max_sentences: int | None = _field(None, "at most so many of test, drawn with seed")
    seed: int = _field(42, "of what is drawn")
    curve: list[int] = _field([], "other numbers of retrieved sentences, too")
    cache: str | None = _field(None, "directory that keeps the reference's embeddings for other runs")


@dataclass
class TrainConfig:
    """Train an encoder on scored pairs."""

    model: ModelConfig = _field(ModelConfig, "")
    data: DataConfig = _field(DataConfig, "")
    teacher: TeacherConfig = _field(TeacherConfig, "")
    loss: LossConfig = _field(LossConfig, "")
    training: dict[str, Any] = _field(
        {}, "batch_size, epochs, seed, patience, or any field of SentenceTransformerTrainingArguments"
    )
    evaluation: EvaluationConfig = _field(EvaluationConfig, "")
    polarity: PolarityConfig = _field(PolarityConfig, "")
    output: str | None = _field(None, "directory for model, recipe.yaml, metrics.json, log.jsonl, run.png")
    overwrite: bool = _field(False, "replace what another recipe left in output")


@dataclass
class ScoreConfig:
    """Add S = (S1 + S2) / 2 from teacher encoders to sentence pairs."""

    data: DataConfig = _field(DataConfig, "")
    teachers: list[str] = _field([], "encoders by name or path; by default the paper's two")
    teacher: dict[str, Any] = _field({}, "options of one teacher: {NAME: {prompt: ..., task: ...}}")
    batch_size: int = _field(64, "sentences at a time")
    device: str | None = _field(None, "torch device")
    output: str | None = _field(None, "file to write")
    overwrite: bool = _field(False, "replace the output of another setting")


@dataclass
class ListsConfig:
    """Ranking lists without an LLM: premises, their hypotheses and other sentences, ordered by a teacher."""

    data: DataConfig = _field(DataConfig, "")
    teacher: TeacherConfig = _field(TeacherConfig, "")
    length: int = _field(33, "sentences of a list, its premise included")
    max_lists: int | None = _field(None, "at most so many lists, drawn with seed")
    seed: int = _field(42, "of max_lists")
    output: str | None = _field(None, "JSONL or parquet file to write")
    overwrite: bool = _field(False, "replace the output of another setting")


@dataclass
class MiningSection:
    """Which neighbours make examples."""

    k: int = _field(16, "nearest neighbours of each sentence, of its own class and of the others")
    threshold: float = _field(0.5, "only neighbours whose cosine is above it")
    drop: float = _field(0.0, "share of the examples to leave out, at random")
    count: int | None = _field(None, "at most so many examples, drawn at random")
    seed: int = _field(42, "of what is left out")
    search: str = _field("exact", "exact, in chunks, or faiss, with a flat index")
    batch_size: int = _field(64, "sentences at a time")
    cache: str | None = _field(None, "directory that keeps embeddings and neighbours for other losses [until the end]")


@dataclass
class MineConfig:
    """Examples for contrastive losses from labelled texts, by their neighbours."""

    model: ModelConfig = _field(ModelConfig, "")
    data: DataConfig = _field(DataConfig, "")
    loss: str = _field("triplet", "triplet, contrastive, online_contrastive, multiple_negatives, mse (random pairs)")
    mining: MiningSection = _field(MiningSection, "")
    output: str | None = _field(None, "file to write")
    overwrite: bool = _field(False, "replace the output of another setting")


@dataclass
class EvaluateConfig:
    """Scores of an encoder: similarity, transfer, reranking, captions, MTEB."""

    model: ModelConfig = _field(ModelConfig, "")
    data: DataConfig = _field(DataConfig, "")
    tasks: list[str] = _field(
        [],
        "NAME (looked up in data.dir), FILE, or KIND:NAME and KIND:FILE of sts, transfer, rerank, captions, mteb, "
        "polarity",
    )
    suite: list[str] = _field([], "tasks beside these: sts, transfer, rerank or all")
    polarity: PolarityConfig = _field(PolarityConfig, "")
    analyses: list[str] = _field([], "of the tasks' sentences: degradation, dependency, words")
    submission: str | None = _field(None, "JSON file of predictions for data.input, C-STS rows without labels")
    batch_size: int = _field(64, "sentences at a time")
    output: str | None = _field(None, "JSON file to write")
    overwrite: bool = _field(False, "replace the output of another setting")


@dataclass
class EncodeConfig:
    """Embeddings of the sentences of a file."""

    model: ModelConfig = _field(ModelConfig, "")
    data: DataConfig = _field(DataConfig, "")
    batch_size: int = _field(64, "sentences at a time")
    output: str | None = _field(None, ".npy file to write")
    overwrite: bool = _field(False, "replace the output of another setting")


@dataclass
class LanguageModelConfig:
    """Which language model writes."""

    name: str = _field("", "causal language model, by name or path")
    trust_remote_code: bool = _field(False, "run code that comes with the model")
    revision: str | None = _field(None, "branch, tag or commit on the hub")
    device: str | None = _field(None, "torch device; by default the best there is")
    dtype: str | None = _field(None, "of the weights: float32, bfloat16 or float16 [as saved]")
    attention: str | None = _field(None, "eager, sdpa or flex_attention [transformers' choice]")
    load_in_4bit: bool = _field(False, "weights in 4 bits (NF4); needs a GPU to be fast")


@dataclass
class GenerationSection:
    """How chains are written."""

    REST: typing.ClassVar[str] = "decoding"  # the field that takes keys of other names

    method: str = _field("guided", "guided, iterative (without guidance) or single-step (one prompt for the list)")
    steps: int = _field(32, "sentences of a chain, its source not counted")
    guidance: float = _field(1.5, "1 + lambda: how far from the sentence before the last (guided)")
    max_new_tokens: int = _field(64, "longest sentence in tokens; single-step's list may have steps times as many")
    batch_size: int = _field(16, "chains at a time")
    verify: bool = _field(True, "keep chains that break a rule apart; false keeps all among the others")
    seed: int = _field(42, "of random choices (do_sample), each chain and step its own")
    prompt: str | None = _field(None, "in place of the paper's: a text with {sentence}, perhaps {steps} and {example}")
    chat: bool | None = _field(None, "use the tokenizer's chat template [where there is one]")
    max_input_tokens: int = _field(128, "longer sentences to begin with are skipped, and counted")
    mix: str = _field("auto", "mix hidden states before the head or logits after it: hidden, logits [hidden if exact]")
    compile: bool = _field(False, "torch.compile the decoding step")
    decoding: dict[str, Any] = _field(
        {}, "fields of GenerationConfig, also as generation.NAME: do_sample, temperature, top_p, stop_strings ..."
    )


@dataclass
class SeedsConfig:
    """Begin with some sentences of each k-means cluster instead of with all."""

    encoder: str | None = _field(None, "encoder that embeds data.input, by name or path; without one all are used")
    clusters: int = _field(1000, "k-means clusters")
    per_cluster: int = _field(20, "sentences drawn of each")
    seed: int = _field(42, "of the clusters and the draw")
    batch_size: int = _field(64, "sentences at a time")
    device: str | None = _field(None, "torch device")


@dataclass
class GenerateConfig:
    """Chains of sentences that move away from one step by step."""

    model: LanguageModelConfig = _field(LanguageModelConfig, "")
    data: DataConfig = _field(DataConfig, "")
    seeds: SeedsConfig = _field(SeedsConfig, "")
    generation: GenerationSection = _field(GenerationSection, "")
    output: str | None = _field(None, ".jsonl file to write")
    overwrite: bool = _field(False, "replace the output of another setting")


@dataclass
class ReportConfig:
    """Results of evaluate side by side, or how chains drift from their source: a page with tables and plots."""

    WORDS: typing.ClassVar[str] = "results"  # the field that words before the first --key go to

    results: list[str] = _field(
        [], "JSON files of evaluate and directories of train, which are compared with the first; or files of chains"
    )
    resamples: int = _field(2000, "of the bootstrap of differences between results")
    model: ModelConfig = _field(ModelConfig, "")
    length: int = _field(16, "sentences of a chain that are looked at, its source included")
    max_chains: int = _field(1000, "at most so many of a file, drawn with seed")
    examples: int = _field(3, "chains that are shown, of sources that all files have")
    seed: int = _field(42, "of max_chains and the intervals")
    on_error: str = _field("raise", "a malformed row: raise, or skip (and count)")
    batch_size: int = _field(64, "sentences at a time")
    output: str | None = _field(None, "directory to write")
    overwrite: bool = _field(False, "replace the report of other settings")


@dataclass
class SweepConfig:
    """A table of training runs: variants x seeds, each evaluated on the same tasks."""

    prepare: dict[str, Any] = _field({}, "jobs that make what the runs use: name: {job, recipe, keys of that job}")
    base: str = _field("", "training recipe that every run starts from")
    settings: dict[str, Any] = _field({}, "changes to that recipe, for every run")
    variants: dict[str, Any] = _field({}, "name: changes; base, seeds, grid and after are special keys")
    seeds: list[int] = _field([42], "training.seed of the runs of a variant")
    tasks: list[str] = _field([], "tasks of any kind, before and after, looked up in data_dir")
    data_dir: str | None = _field(None, "settings.data.dir; any setting may say {data_dir}")
    model: str | None = _field(None, "settings.model.name; any setting may say {model}")
    compare: list[Any] = _field([], "pairs of variants: their difference, with a paired t-test over seeds")
    only: list[str] = _field([], "run these variants (shell patterns)")
    measure: bool = _field(False, "report peak memory and time of training; each run has a process of its own")
    keep_models: bool = _field(False, "keep the weights of finished runs")
    output: str | None = _field(None, "directory for results.jsonl, report.md and the plots")
    overwrite: bool = _field(False, "redo runs whose settings changed")


@dataclass
class ExportConfig:
    """Save an encoder with its adapter merged in."""

    model: ModelConfig = _field(ModelConfig, "")
    merge: bool = _field(False, "make one model of a LoRA adapter and its base")
    output: str | None = _field(None, "directory to write")
    overwrite: bool = _field(False, "replace what is in output")


@dataclass
class CheckConfig:
    """Padding and batch-size invariance of a saved encoder."""

    model: ModelConfig = _field(ModelConfig, "")
    output: str | None = _field(None, "JSON file to write")


JOBS: dict[str, type] = {
    "train": TrainConfig,
    "score": ScoreConfig,
    "lists": ListsConfig,
    "mine": MineConfig,
    "evaluate": EvaluateConfig,
    "encode": EncodeConfig,
    "generate": GenerateConfig,
    "sweep": SweepConfig,
    "report": ReportConfig,
    "export": ExportConfig,
    "check": CheckConfig,
}
# Keys under which other names of the same thing are stored.
TRAINING_NAMES = {
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "epochs",
}
