"""Any loss, its batches encoded by length: no padding to the longest text of all, and no text twice. And what holds an
encoder to what it knew: the embeddings that it gave before training."""

import copy
import inspect
import random
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss
from torch import Tensor, nn
from torch.nn import functional

from raoe_train.encoders.lengths import Runs, by_length, counts_leading_padding, words_looked_up_once
from raoe_train.losses.base import CachedLoss, carrying, from_zero, with_own_gradients
from raoe_train.losses.pairs import LossParts

ALIGNED = 16  # tokens; lengths of runs are multiples of it where the model is compiled
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
OF_EMBEDDINGS = "compute_loss_from_embeddings"
PACKAGES = ("sentence_transformers.", "raoe_train.")


def innermost(loss: Any) -> Any:
    """The loss inside of ByLength, a MatryoshkaLoss or the like."""
    while isinstance(getattr(loss, "loss", None), nn.Module):
        loss = loss.loss
    return loss


def fits(loss: Any) -> bool:
    """Whether a loss needs of its model nothing but each text's embedding: its forward embeds the columns and hands
    them to compute_loss_from_embeddings. Only of sentence-transformers' forwards and ours that is known."""
    if isinstance(loss, MatryoshkaLoss):
        return fits(loss.loss)
    known = next(cls for cls in type(loss).__mro__ if "forward" in vars(cls)).__module__.startswith(PACKAGES)
    first = next(vars(cls) for cls in type(loss).__mro__ if {"forward", OF_EMBEDDINGS} & vars(cls).keys())
    if not known or OF_EMBEDDINGS not in first:
        return False
    return "labels" in inspect.signature(loss.compute_loss_from_embeddings).parameters


def loss_of(loss: Any, columns: list[Tensor], labels: Any) -> Any:
    """A loss of (B, D) columns of embeddings, as it would make it of their texts; labels as its `beside` has them."""
    if isinstance(loss, MatryoshkaLoss):
        widths = [*zip(loss.matryoshka_dims, loss.matryoshka_weights, strict=True)]
        if 0 < loss.n_dims_per_step < len(widths):
            widths = random.sample(widths, loss.n_dims_per_step)
        cut = [(weight, [nn.functional.normalize(x[:, :d], dim=-1) for x in columns], d) for d, weight in widths]
        return sum(weight * loss_of(loss.loss, shorter, _cut(labels, columns, d)) for weight, shorter, d in cut)
    if isinstance(loss, CachedLoss):
        return loss.compute_loss_from_embeddings(columns, **labels)
    return loss.compute_loss_from_embeddings(columns, labels)


def _cut(labels: Any, columns: list[Tensor], width: int) -> Any:
    """Labels that are embeddings are cut as the columns are."""
    embeddings = isinstance(labels, Tensor) and labels.ndim in (2, 3) and labels.shape[-1] == columns[0].shape[-1]
    return labels[..., :width] if embeddings else labels


def weight_for(datasets: Any, keep: float | Literal["auto"]) -> float:
    """`keep`; in place of "auto", with a line printed, 1, and 0.3 where the scores of the dataset, or of all datasets
    by name, have two values: to tell classes apart texts have to move further (docs/adapt.md)."""
    if keep != "auto":
        return keep
    every = [*datasets.values()] if isinstance(datasets, Mapping) else [datasets]
    if any(not hasattr(dataset, "__len__") for dataset in every):
        raise ValueError('keep "auto" reads the scores of datasets of a known length: give a number, such as 1')
    scores = [{*dataset["score"][:]} for dataset in every if "score" in dataset.column_names]
    weight = 0.3 if scores and max(map(len, scores)) == 2 else 1.0
    print(f"keep {weight:g}")
    return weight


class Keep:
    """A term beside any loss: the mean over a batch's texts of 1 - cos(embedding, the same text's before training).

    The less-forget constraint of Hou et al. (2019, equation 6), with the encoder's own start for the old model;
    docs/adapt.md has what it brings.

    Args:
        model: the encoder as it is now, of which a frozen copy is made. It reads every batch without dropout: a third
            of a step more, and the weights twice in memory.
        weight: of the term, from 0.
    """

    def __init__(self, model: Any, weight: float) -> None:
        from_zero(keep=weight)
        self.weight = weight
        self.start = copy.deepcopy(model).requires_grad_(False).eval()

    def __call__(self, now: Tensor, before: Tensor) -> Tensor:
        """The term, (), of the (texts, D) embeddings of the same texts now and before."""
        # bfloat16 rounds a cosine near 1 by as much as training moves it
        with torch.autocast(now.device.type, enabled=False):
            wide = torch.promote_types(now.dtype, torch.float32)
            return self.weight * (1 - functional.cosine_similarity(now.to(wide), before.to(wide))).mean()


class ByLength(CachedLossMixin, nn.Module):
    """A loss whose encoder reads a batch's texts by length (raoe_train.encoders.lengths): those of all columns together
    in runs that are padded to their own longest, equal texts once.

    The loss and its gradient are those of the padded batch, but for rounding, and for dropout, whose draws differ.
    raoe_train.Trainer puts it around every loss; with SentenceTransformerTrainer write loss=ByLength(loss).

    With a loss that caches gradients (`mini_batch_size`, `mini_batch_num_tokens`) the runs are its mini-batches: none
    has more tokens, padding included, than mini_batch_num_tokens, or than mini_batch_size times the longest text.
    Where processes share a model's forwards (DDP, FSDP) all make equally many. Batches that are not rows of tokens
    (images, packed ones) go to the loss as they are.

    Args:
        loss: a loss of sentence embeddings, see `fits`, ours or sentence-transformers', also in a MatryoshkaLoss.
        packed: on CUDA a run's texts stand side by side without any padding, where raoe_train.encoders.packed can.
        keep: a term that holds embeddings of the batch's texts where they were; the loss is LossParts then, of which
            it is "keep", and the loss of the batch, where that has no parts, "target".
    """

    mini_batch_size = 1  # of what forward_cached takes for rows: runs

    def __init__(self, loss: nn.Module, *, packed: bool = False, keep: Keep | None = None) -> None:
        super().__init__()
        if not fits(loss):
            raise ValueError(f"{type(loss).__name__} reads more of its model than embeddings: use no ByLength")
        self.loss = loss
        self.packed = packed
        self.keep = keep
        inner = innermost(loss)
        self.model: Any = inner.model if hasattr(inner, "model") else inner.sentence_embedder  # BatchAllTripletLoss

    @property
    def uses_gradient_cache(self) -> bool:  # type: ignore[override]
        """Whether the loss encodes its batches piece by piece."""
        return getattr(self.loss, "uses_gradient_cache", False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Any:
        """The loss of tokenised columns, and labels as the loss takes them."""
        features, inner = list(sentence_features), innermost(self.loss)
        runs = self._runs(features)
        if runs is None and self.keep is not None:
            raise ValueError("keep is for batches of texts, as a tokenizer makes them")
        if runs is None:
            return self.loss(features, labels)
        beside = inner.beside(features, labels) if isinstance(inner, CachedLoss) else labels
        batch = _Batch(runs.rows, beside, self._start(runs))
        if self.uses_gradient_cache:
            rows: Any = {"input_ids": torch.arange(len(runs.features)), "runs": runs.features}
            self._parts: Any = None
            loss = with_own_gradients(self, lambda: self.forward_cached([rows], batch))  # type: ignore[arg-type]
            return loss if self._parts is None else carrying(self._parts, loss)
        with self._words(runs):
            table = torch.cat([self._embedded(run) for run in runs.features])
        return self._value(table, batch)

    def _start(self, runs: Runs) -> Tensor | None:
        """Embeddings of the runs' texts before training, where they are to be held."""
        if self.keep is None or not (self.model.training and torch.is_grad_enabled()):
            return None
        with torch.no_grad():
            return torch.cat([self._embedded(run, self.keep.start) for run in runs.features])

    def _value(self, table: Tensor, batch: "_Batch") -> Any:
        """The loss of (texts, D) embeddings, with the regularizer of `keep`."""
        loss = loss_of(self.loss, [table[rows] for rows in batch.rows], batch.labels)
        if self.keep is None or batch.before is None:
            return loss
        parts = LossParts(loss if isinstance(loss, dict) else {"target": loss})
        return parts + {"keep": self.keep(table, batch.before)}

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """CachedLossMixin's: (embeddings of a run, the random state before)."""
        run = sentence_feature["runs"][begin]
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            before = RandContext(*run.values()) if copy_random_state else None
            return self._embedded(run), before

    def _embedded(self, run: dict[str, Any], model: Any = None) -> Tensor:
        model = self.model if model is None else model
        if self.packed:
            from raoe_train.encoders.packed import pack

            run = pack(_layers(model)[-1], run)
        return model(dict(run))["sentence_embedding"]  # modules write into it

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """CachedLossMixin's: the loss of the embeddings of all runs; `labels` is the _Batch."""
        (runs,) = reps
        table = torch.cat(runs).detach().requires_grad_(with_backward)
        loss = self._value(table, labels)
        if isinstance(loss, dict):
            self._parts, loss = loss, torch.stack([*loss.values()]).sum()
        if not with_backward:
            return loss
        loss.backward()
        gradient = torch.zeros_like(table) if table.grad is None else table.grad
        for run, part in zip(runs, gradient.split([len(run) for run in runs]), strict=True):
            run.grad = part
        return loss.detach()

    def _runs(self, features: list[dict[str, Tensor]]) -> Runs | None:
        *wrappers, inner = _layers(self.model)
        room: dict[str, int] = {}
        if self.uses_gradient_cache:
            cached = innermost(self.loss)
            tokens = getattr(cached, "mini_batch_num_tokens", None)
            room = {"most_texts": cached.mini_batch_size} if tokens is None else {"most": tokens}
        aligned = ALIGNED if _is(wrappers, "OptimizedModule") else 1
        runs = by_length(features, **room, multiple=aligned, keep_leading=counts_leading_padding(inner))
        if runs is not None:
            # nobody looks up what is beyond a process's own
            missing = _of_all(len(runs.features), [*wrappers, inner]) - len(runs.features)
            runs.features.extend([runs.features[0]] * missing)
        return runs

    def _words(self, runs: Runs) -> AbstractContextManager[None]:
        """Not where weights are sharded, or a graph has been compiled."""
        layers = _layers(self.model)
        other = _is(layers, "FSDPModule", "FullyShardedDataParallel", "OptimizedModule")
        return nullcontext() if other else words_looked_up_once(layers[-1], runs)

    def get_config_dict(self) -> dict[str, Any]:
        """The loss and its keywords, for the model card."""
        loss: Any = self.loss
        return {"loss": type(loss).__name__, **(loss.get_config_dict() if hasattr(loss, "get_config_dict") else {})}


class _Batch(NamedTuple):
    """What a batch's loss is made of, beside the embeddings of its texts."""

    rows: list[Tensor]  # of each column, the texts' places among those that are encoded
    labels: Any
    before: Tensor | None  # embeddings before training, where they are to be held


def _layers(model: Any) -> list[Any]:
    """A model inside its wrappers (DDP, FSDP 1, torch.compile), from outside to inside."""
    found = [model]
    while True:
        inner = getattr(found[-1], "_orig_mod", None)
        if inner is None and type(found[-1]).__name__ in WRAPPERS:
            inner = found[-1].module
        if inner is None:
            return found
        found.append(inner)


def _is(layers: list[Any], *names: str) -> bool:
    """Whether one of a model's wrappers is of a class of torch's: by name, so that nothing need be imported for it."""
    return bool({base.__name__ for each in layers for base in type(each).__mro__} & set(names))


def _of_all(forwards: int, layers: list[Any]) -> int:
    """As many forwards as the process with the most makes, where they are made together."""
    if not (dist.is_available() and dist.is_initialized()) or not _is(layers, *WRAPPERS, "FSDPModule"):
        return forwards
    most = torch.tensor(forwards, device=next(layers[-1].parameters()).device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
