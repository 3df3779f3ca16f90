"""ByLength wraps a loss and encodes each distinct text in a batch once, in groups of similar length or packed into one
row."""

import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from raoe_train.encoders.lengths import Grouping, by_length, device_of, grouping_for, words_looked_up_once
from raoe_train.encoders.packed import LENGTHS, is_default, pack, vary_sizes
from raoe_train.encoders.padding import reads_padding
from raoe_train.losses import base
from raoe_train.losses.base import CachedLoss, LossParts
from raoe_train.losses.keep import Keep

warn_once = functools.cache(logging.getLogger(__name__).warning)
LENGTH_MULTIPLE = 16  # for a compiled model, padded lengths are multiples of this number of tokens
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
EMBEDDING_LOSS = "compute_loss_from_embeddings"
PACKAGES = ("sentence_transformers.", "raoe_train.")
# sentence-transformers losses that lack EMBEDDING_LOSS, but need only column embeddings from the model
EMBED_COLUMNS = ("SoftmaxLoss", "GISTEmbedLoss", "CachedGISTEmbedLoss", "MegaBatchMarginLoss",
                 "CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss",
                 *(LABELS_ARE_EMBEDDINGS := ("MSELoss", "EmbedDistillLoss")))  # fmt: skip


def innermost(loss: Any) -> Any:
    """Return the innermost loss inside wrappers such as ByLength and MatryoshkaLoss."""
    while isinstance(getattr(loss, "loss", None), nn.Module) and not embeds_columns(loss):
        loss = loss.loss
    return loss


def embeds_columns(loss: Any) -> bool:
    """Return whether a loss's class is in EMBED_COLUMNS, or inherits its `forward` from such a class."""
    for cls in type(loss).__mro__:
        if cls.__name__ in EMBED_COLUMNS and cls.__module__.startswith(PACKAGES[0]):
            return True
        if "forward" in vars(cls):
            break
    return False


def misfit(loss: Any) -> str | None:
    """Return the reason why ByLength cannot wrap a loss, or None if it can. ByLength can wrap a loss that needs only
    embeddings. This is the case if the loss's class is in EMBED_COLUMNS, or if its `forward` is defined in
    sentence-transformers or raoe_train and calls compute_loss_from_embeddings. In addition, the encoder's embedding of
    a text must not depend on padding (see reads_padding) or on other texts in the batch."""
    if isinstance(loss, MatryoshkaLoss):
        return misfit(loss.loss)
    if not isinstance(loss, nn.Module):
        return f"{loss!r} is not a loss: pass a loss, such as CoSENTLoss(model)"
    is_ours = next(cls for cls in type(loss).__mro__ if "forward" in vars(cls)).__module__.startswith(PACKAGES)
    members = next(vars(cls) for cls in type(loss).__mro__ if {"forward", EMBEDDING_LOSS} & vars(cls).keys())
    has_labels = EMBEDDING_LOSS in members and "labels" in inspect.signature(members[EMBEDDING_LOSS]).parameters
    if not (embeds_columns(loss) or (is_ours and has_labels)):
        advice = "inherit from raoe_train.losses.CachedLoss, and implement compute_loss_from_embeddings"
        return f"{type(loss).__name__} may need more than embeddings; if it does not, {advice}"
    model = _layers(_encoder(loss))[-1]
    mixing = [type(each).__name__ for each in model.modules() if isinstance(each, BatchNorm)]
    return f"{mixing[0]} in the encoder mixes the texts in a batch" if mixing else reads_padding(model)


def _encoder(loss: Any) -> Any:
    return loss.model if hasattr(loss, "model") else loss.sentence_embedder  # BatchAllTripletLoss


def loss_of(loss: Any, columns: list[Tensor], labels: Any, tokens: list[dict[str, Any]]) -> Any:
    """Compute a loss from the (B, D) embeddings of its columns. `labels` is the result of the loss's method
    prepare_labels or, if there is no such method, the labels of the batch. For a loss with a guide, `tokens` contains
    the tokenized columns."""
    if isinstance(loss, MatryoshkaLoss):
        if loss.uses_gradient_cache and embeds_columns(loss.loss):
            # its calculate_loss already sums over all widths, because MatryoshkaLoss replaced it
            return loss_of(loss.loss, columns, labels, tokens)
        widths = [*zip(loss.matryoshka_dims, loss.matryoshka_weights, strict=True)]
        if 0 < loss.n_dims_per_step < len(widths):
            widths = random.sample(widths, loss.n_dims_per_step)
        total: Any = 0
        for width, weight in widths:
            heads = [functional.normalize(column[:, :width], dim=-1) for column in columns]
            part = loss_of(loss.loss, heads, _cut_labels(loss.loss, labels, width), tokens)
            total = total + weight * part
        return total
    if embeds_columns(loss):
        return _embedding_loss(loss, columns, labels, tokens)
    if isinstance(loss, CachedLoss):
        return loss.compute_loss_from_embeddings(columns, **labels)
    try:
        return loss.compute_loss_from_embeddings(columns, labels)
    except ValueError as error:
        if "values to unpack" not in str(error):
            raise
        raise ValueError(f"{type(loss).__name__} does not accept {len(columns)} columns of texts") from None


def _embedding_loss(loss: Any, columns: list[Tensor], labels: Any, tokens: list[dict[str, Any]]) -> Any:
    """Compute a loss whose class is in EMBED_COLUMNS, with a substitute model that returns the given embeddings."""
    replays = getattr(loss, "uses_gradient_cache", False) and torch.is_grad_enabled()
    leaves = [x.detach().requires_grad_() for x in columns] if replays else columns
    tokens = tokens or [{"attention_mask": x.new_ones(len(x), 1)} for x in leaves]
    # (B, 1, D), because a loss that cuts the padding of (B, L) tokens would also cut (B, D) embeddings
    features = [{**each, "embeddings": x[:, None]} for each, x in zip(tokens, leaves, strict=True)]
    model, loss.model = loss.model, Embedded()
    try:
        value = loss(features, labels)
        if not replays:
            return value
        value.backward()  # replays the mini-batches and sets leaf.grad
    finally:
        loss.model = model
    value = value.detach()
    leaf: Any
    for column, leaf in zip(columns, leaves, strict=True):
        value = value + ((column - column.detach()) * leaf.grad).sum()
    return value


def _prepare_labels(inner: Any, columns: list[dict[str, Any]], labels: Any) -> Any:
    return inner.prepare_labels(columns, labels) if isinstance(inner, CachedLoss) else labels


def _count_texts(column: dict[str, Any]) -> int:
    """Return the number of texts or images in a column of any format."""
    if "cu_seq_lens_q" in column:
        return len(column["cu_seq_lens_q"]) - 1
    return len(column["offsets"] if "offsets" in column else next(iter(column.values())))


def _cut_labels(loss: Any, labels: Any, width: int) -> Any:
    """Truncate labels to `width` dimensions if they are embeddings (losses in LABELS_ARE_EMBEDDINGS)."""
    is_cut = isinstance(labels, Tensor) and any(cls.__name__ in LABELS_ARE_EMBEDDINGS for cls in type(loss).__mro__)
    return labels[..., :width] if is_cut else labels


class Embedded(nn.Module):
    """Substitute for the model of a loss whose columns are already (B, 1, D) embeddings."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return {**features, "sentence_embedding": features["embeddings"][:, 0]}


@dataclass
class Batch:
    """A batch planned by ByLength. The batch stays on the CPU until the method `to` moves it to the model's device."""

    runs: list[dict[str, Any]]  # features of each forward pass
    rows: list[Tensor]  # for each column, the indices of its texts among the encoded texts
    labels: Any
    words: Tensor | None = None  # distinct tokens of all runs, if there are several runs
    tokens: list[dict[str, Any]] | None = None  # tokenized columns, for losses with a guide
    before: Tensor | None = None  # embeddings before training, for `keep`

    def to(self, device: Any, **_: Any) -> "Batch":
        return self._change(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._change(Tensor.pin_memory)

    def _change(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(**{each.name: recursively_apply(function, getattr(self, each.name)) for each in fields(self)})


class ByLength(CachedLossMixin, nn.Module):
    """Wrapper that encodes the distinct texts in a batch by length (raoe_train.encoders.lengths): in groups of similar
    length, each padded to its own longest text, or packed into one row without padding.

    The loss and its gradient equal those of the padded batch, up to rounding and dropout masks. `raoe_train.Trainer`
    wraps all losses that ByLength supports (see `misfit`), and plans batches in the collator. With
    SentenceTransformerTrainer, write loss=ByLength(loss).

    If the loss uses gradient caching, each group is a mini-batch. Including padding, a group contains at most
    `mini_batch_num_tokens` tokens or, if only `mini_batch_size` is set, mini_batch_size x (length of the longest text)
    tokens. With DDP or FSDP, all processes run the same number of forward passes. Batches of images are passed to the
    loss unchanged.

    Args:
        loss: a loss that needs only embeddings (see `misfit`), or sentence-transformers' MatryoshkaLoss around one.
        keep: the regularizer that keeps embeddings close to those before training. With `keep`, `forward`
            returns LossParts with "keep" and the parts of the loss (a loss without parts becomes the part "target").
        packed: pack all texts into one row (raoe_train.encoders.packed); with "auto", only on CUDA with Triton. If
            the model does not support packing, a warning gives the reason, and texts are encoded in padded groups. A
            model with FlashAttention always packs texts.

    Attributes:
        compiled, captured, tensor_cores: whether the model is compiled, captured as CUDA graphs, and trained in 16-bit
            or TF32 precision. Trainer sets these attributes.
    """

    mini_batch_size = 1  # forward_cached gets one run at a time
    compiled = captured = tensor_cores = False
    grouping: Grouping | None = None  # set only in a planner

    def __init__(self, loss: nn.Module, *, keep: Keep | None = None, packed: bool | Literal["auto"] = "auto") -> None:
        super().__init__()
        if problem := misfit(loss):
            raise ValueError(f"ByLength cannot wrap this loss: {problem}")
        self.loss = loss
        self.keep = keep
        self.model: Any = _encoder(innermost(loss))
        if packed == "auto":
            packed = is_default(device_of(self.model))
        for model in (self.model, *([keep.start] if keep else [])):
            reason = pack(_layers(model)[-1], packed) if packed or device_of(model).type != "cpu" else None
            if packed and reason is not None:
                warn_once("texts are not packed, but encoded by length: %s", reason)

    @property
    def uses_gradient_cache(self) -> bool:  # type: ignore[override]
        """Return whether the loss encodes its batches in mini-batches."""
        return getattr(innermost(self.loss), "uses_gradient_cache", False)

    def plan(self, features: Iterable[dict[str, Any]], labels: Any = None) -> Batch | None:
        """Plan a batch of tokenized columns on the CPU: which texts each forward pass encodes, and what the loss needs
        besides embeddings. Return None for columns without rows of tokens, such as images."""
        columns, inner = [*features], innermost(self.loss)
        guided = not self.plans_rows
        runs = None if guided and "cu_seq_lens_q" in columns[0] else by_length(columns, self._grouping(inner))
        if runs is None:
            return None
        words = None
        if len(runs.features) > 1 and not self.uses_gradient_cache:  # gradient caching cannot share a look-up
            words = torch.cat([run["input_ids"].flatten() for run in runs.features]).unique()
        prepared = _prepare_labels(inner, columns, labels)
        return Batch(runs.features, runs.rows, prepared, words, columns if guided else [])

    def planner(self) -> "ByLength":
        """Return a copy for DataLoader workers, which contains no encoders and only plans batches."""
        inner = innermost(self.loss)
        bare = base.without_modules(self)
        bare.loss = base.without_modules(inner)
        bare.keep, bare.grouping = None, self._grouping(inner)
        return bare

    @property
    def plans_rows(self) -> bool:
        """Return whether `plan` accepts columns without padding, which the guides of some losses cannot read."""
        inner = innermost(self.loss)
        return not (embeds_columns(inner) and hasattr(inner, "guide"))

    def _grouping(self, inner: Any) -> Grouping:
        if self.grouping is not None:
            return self.grouping
        *wrappers, model = _layers(self.model)
        limits: dict[str, Any] = {}
        if self.compiled or _is(wrappers, "OptimizedModule"):
            limits["multiple"] = LENGTH_MULTIPLE
        if self.captured and not self.uses_gradient_cache:
            limits |= {"multiple": LENGTHS, "buckets": True}
        if self.uses_gradient_cache:
            tokens = getattr(inner, "mini_batch_num_tokens", None)
            limits |= {"most_texts": inner.mini_batch_size} if tokens is None else {"most": tokens}
        return grouping_for(model, tensor_cores=self.tensor_cores, **limits)

    def forward(self, sentence_features: Any, labels: Any = None) -> Any:
        """Return the loss of a planned batch, or of tokenized columns. `labels` are passed to the wrapped loss."""
        features: Any = sentence_features if isinstance(sentence_features, Batch) else [*sentence_features]
        planned = features if isinstance(features, Batch) else self.plan(features, labels)
        if planned is None and self.keep is None:
            return self.loss(features, labels)
        if planned is None:  # for example, of a StaticEmbedding: each column is a run
            sizes = [*map(_count_texts, features)]
            rows: Any = [*torch.arange(sum(sizes), device="cpu").split(sizes)]
            planned = Batch(features, rows, _prepare_labels(innermost(self.loss), features, labels), tokens=features)
        batch = planned.to(device_of(self.model))
        if self.keep is not None and self.model.training and torch.is_grad_enabled():
            with torch.no_grad():
                batch.before = torch.cat([self._embedded(run, self.keep.start) for run in batch.runs])
        # if other processes have more runs (DDP, FSDP), repeat a run and ignore its embeddings
        layers = _layers(self.model)
        batch.runs += [batch.runs[0]] * (_most_forwards(len(batch.runs), layers) - len(batch.runs))
        if self.captured and device_of(self.model).type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        if _is(layers, "OptimizedModule"):
            batch.runs = [vary_sizes(run) for run in batch.runs]
        tokens = sum(run["input_ids"].numel() for run in batch.runs if "input_ids" in run)
        most = getattr(innermost(self.loss), "mini_batch_num_tokens", None) or 0
        # a batch that fits into one mini-batch is encoded once, without replay, if this holds in all processes
        fits_at_once = len(batch.runs) == 1 or (tokens <= most and not (dist.is_available() and dist.is_initialized()))
        if self.uses_gradient_cache and not fits_at_once:
            rows = {"input_ids": torch.arange(len(batch.runs), device="cpu"), "runs": batch.runs}
            return base.cached(self, [rows], batch)
        # looked-up rows cannot be shared if weights are sharded or the model is compiled
        is_wrapped = _is(layers, "FSDPModule", "FullyShardedDataParallel", "OptimizedModule")
        with nullcontext() if is_wrapped else words_looked_up_once(layers[-1], batch.words):
            embeddings = torch.cat([self._embedded(run) for run in batch.runs])
        return self._value(embeddings, batch)

    def _value(self, embeddings: Tensor, batch: Batch) -> Any:
        """Compute the loss from embeddings [texts, D], and add the value of the regularizer `keep` if it is set."""
        loss = loss_of(self.loss, [embeddings[rows] for rows in batch.rows], batch.labels, batch.tokens or [])
        if self.keep is None or batch.before is None:
            return loss
        parts = LossParts(loss if isinstance(loss, dict) else {"target": loss})
        return parts + {"keep": self.keep(embeddings[: len(batch.before)], batch.before)}  # without repeated runs

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """Hook of CachedLossMixin: return (embeddings of one forward pass, random state before this forward pass)."""
        run = sentence_feature["runs"][begin]
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            state = RandContext(*run.values()) if copy_random_state else None
            return self._embedded(run), state

    def _embedded(self, run: dict[str, Any], model: Any = None) -> Tensor:
        run = dict(run)  # a copy, because modules write to the dict
        count = run.pop("count", None)
        embeddings = (model or self.model)(run)["sentence_embedding"]
        return embeddings if count is None else embeddings[:count]

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """Hook of CachedLossMixin: compute the loss from all forward passes' embeddings. `labels` is the Batch."""
        (runs,) = reps
        embeddings = torch.cat(runs).detach().requires_grad_(with_backward)
        loss = base.scalar(self, self._value(embeddings, labels))
        if not with_backward:
            return loss
        base.backward(loss)
        gradient = torch.zeros_like(embeddings) if embeddings.grad is None else embeddings.grad
        for run, part in zip(runs, gradient.split([len(run) for run in runs]), strict=True):
            run.grad = part
        return loss.detach()

    def get_config_dict(self) -> dict[str, Any]:
        """Return the name of the loss and its keyword arguments, for the model card."""
        loss: Any = self.loss
        return {"loss": type(loss).__name__, **(loss.get_config_dict() if hasattr(loss, "get_config_dict") else {})}


def _layers(model: Any) -> list[Any]:
    """Return a model and its wrappers (DDP, FSDP 1, torch.compile), from the outermost wrapper to the model."""
    layers = [model]
    while True:
        inner = getattr(layers[-1], "_orig_mod", None)
        if inner is None and type(layers[-1]).__name__ in WRAPPERS:
            inner = layers[-1].module
        if inner is None:
            return layers
        layers.append(inner)


def _is(layers: list[Any], *names: str) -> bool:
    """Return whether the model or a wrapper is an instance of a class in `names`. Comparing names avoids imports."""
    return bool({cls.__name__ for each in layers for cls in type(each).__mro__} & set(names))


def _most_forwards(forwards: int, layers: list[Any]) -> int:
    """Return the number of forward passes to run: `forwards` or, with DDP or FSDP, its maximum over all processes."""
    if not (dist.is_available() and dist.is_initialized()) or not _is(layers, *WRAPPERS, "FSDPModule"):
        return forwards
    count = torch.tensor(forwards, device="cpu")
    dist.all_reduce(count, dist.ReduceOp.MAX, _on_hosts(dist.group.WORLD))
    return int(count)


@functools.lru_cache(maxsize=1)
def _on_hosts(world: Any) -> Any:
    """Return a gloo process group, which communicates tensors on the CPU. An NCCL group would wait for GPUs."""
    return dist.new_group(backend="gloo")
