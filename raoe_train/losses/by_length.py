"""Any loss, its batches encoded by length: no padding to the longest text of all, and no text twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext
from torch import Tensor, nn

from raoe_train.encoders.lengths import Runs, by_length, counts_leading_padding, words_looked_up_once
from raoe_train.losses.base import carrying, losses_in, with_own_gradients
from raoe_train.losses.keep import Keep
from raoe_train.losses.pair_losses import LossParts

ROW = "row"  # of features: where a text's embedding is
ALIGNED = 16  # tokens; lengths of runs are multiples of it where the model is compiled
MODELS = ("model", "sentence_embedder")  # what losses call it
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
READ_TOKENS = ("AdaptiveLayerLoss", "DenoisingAutoEncoderLoss", "Matryoshka2dLoss")


def fits(loss: Any) -> bool:
    """Whether a loss needs of its model nothing but each text's embedding."""
    return bool(_readers(loss)) and not any(type(each).__name__ in READ_TOKENS for each in _losses(loss))


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
        loss: a loss of sentence embeddings, ours or sentence-transformers', a MatryoshkaLoss, too.
        packed: on CUDA a run's texts stand side by side without any padding, where raoe_train.encoders.packed can.
        keep: a term that holds embeddings of the batch's texts where they were; the loss is LossParts then, of which
            it is "keep", and the loss of the batch, where that has no parts, "target".

    Raises:
        ValueError: a loss that reads tokens or layers, too, see `fits`; batches that are no tokens, with a `keep`.
    """

    mini_batch_size = 1  # of what forward_cached takes for rows: runs

    def __init__(self, loss: nn.Module, *, packed: bool = False, keep: Keep | None = None) -> None:
        super().__init__()
        if not fits(loss):
            raise ValueError(
                f"{type(loss).__name__} reads more of its model than embeddings: train it without ByLength"
            )
        self.loss = loss
        self.packed = packed
        self.keep = keep
        self.model: Any = getattr(*_readers(loss)[0])
        self.saved = 0  # tokens of training batches that were not computed: padding, and texts that are there twice

    @property
    def uses_gradient_cache(self) -> bool:  # type: ignore[override]
        """Whether the loss encodes its batches piece by piece."""
        return getattr(self.loss, "uses_gradient_cache", False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Any:
        """The loss of tokenised columns, and labels as the loss takes them."""
        features = list(sentence_features)
        runs = self._runs(features)
        if runs is None and self.keep is not None:
            raise ValueError("keep is for batches of texts, as a tokenizer makes them")
        if runs is None:
            return self.loss(features, labels)
        self._before = self._start(runs)
        columns = [{**column, ROW: rows} for column, rows in zip(features, runs.rows, strict=True)]
        if self.uses_gradient_cache:
            rows: Any = {"input_ids": torch.arange(len(runs.features)), "runs": runs.features}
            self._parts: Any = None
            whole: Any = (columns, labels)
            loss = with_own_gradients(self, lambda: self.forward_cached([rows], whole))
            return loss if self._parts is None else carrying(self._parts, loss)
        with self._words(runs):
            table = torch.cat([self._embedded(run) for run in runs.features])
        looked_up = _Table(self.model, table)
        with self._looking_up(looked_up):
            return self._held(self.loss(columns, labels), looked_up)

    def _start(self, runs: Runs) -> Tensor | None:
        """Embeddings of the runs' texts before training, where they are to be held."""
        if self.keep is None or not (self.model.training and torch.is_grad_enabled()):
            return None
        return self.keep.before(lambda start: torch.cat([self._embedded(run, start) for run in runs.features]))

    def _held(self, loss: Any, table: _Table) -> Any:
        """The loss with the term of `keep`."""
        if self.keep is None or self._before is None:
            return loss
        rows = torch.arange(len(table.embeddings), device=table.embeddings.device)
        parts = LossParts(loss if isinstance(loss, dict) else {"target": loss})
        return parts + {"keep": self.keep(table({ROW: rows})["sentence_embedding"], self._before)}

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
            before = RandContext(*run.values(), *self._devices()) if copy_random_state else None
            return self._embedded(run), before

    def _devices(self) -> list[Tensor]:
        """A tensor on each device of an encoder that has several: each has a random state of its own."""
        return [torch.empty(0, device=place) for place in {*getattr(self.model, "hf_device_map", {}).values()}]

    def _embedded(self, run: dict[str, Any], model: Any = None) -> Tensor:
        model = self.model if model is None else model
        if self.packed:
            from raoe_train.encoders.packed import pack

            run = pack(_layers(model)[-1], run)
        return model(dict(run))["sentence_embedding"]  # modules write into it

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """CachedLossMixin's: the loss of the embeddings of all runs; labels are (columns, the loss's own labels)."""
        (runs,) = reps
        table = _Table(self.model, torch.cat(runs).detach(), leaves=with_backward)
        with self._looking_up(table):
            loss = self._held(self.loss(*labels), table)
            if isinstance(loss, dict):
                self._parts, loss = loss, torch.stack([*loss.values()]).sum()
            if with_backward:
                loss.backward()
                for run, gradient in zip(runs, table.gradient().split([len(run) for run in runs]), strict=True):
                    run.grad = gradient
        return loss.detach() if with_backward else loss

    def _runs(self, features: list[dict[str, Tensor]]) -> Runs | None:
        *wrappers, inner = _layers(self.model)
        room: dict[str, int] = {}
        if self.uses_gradient_cache:
            cached = next(loss for loss in _losses(self.loss) if hasattr(loss, "mini_batch_size"))
            tokens = getattr(cached, "mini_batch_num_tokens", None)
            room = {"most_texts": cached.mini_batch_size} if tokens is None else {"most": tokens}
        aligned = ALIGNED if _is(wrappers, "OptimizedModule") else 1
        runs = by_length(features, **room, multiple=aligned, keep_leading=counts_leading_padding(inner))
        if runs is not None:
            if torch.is_grad_enabled():
                read, padded = (sum(each["input_ids"].numel() for each in of) for of in (runs.features, features))
                self.saved += padded - read
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

    @contextmanager
    def _looking_up(self, table: _Table) -> Iterator[None]:
        """The loss with the table in the place of its model."""
        models = [(loss, name, getattr(loss, name)) for loss, name in _readers(self.loss)]
        try:
            for loss, name, _ in models:
                setattr(loss, name, table)
            yield
        finally:
            for loss, name, model in models:
                setattr(loss, name, model)


class _Table(nn.Module):
    """Stands in for a model, and looks up embeddings that are there.

    Args:
        leaves: what is looked up is a leaf of the graph; `gradient` sums what came to it. (Through the table itself
            every piece of a cached batch would cost a gradient of the whole table.)
    """

    def __init__(self, model: Any, embeddings: Tensor, *, leaves: bool = False) -> None:
        super().__init__()
        self.embeddings, self.leaves, self.training = embeddings, leaves, model.training
        self._model = [model]  # in a list: no submodule
        self._read: list[tuple[Tensor, Tensor]] = []

    def forward(self, features: dict[str, Any], **others: Any) -> dict[str, Any]:
        if ROW not in features:  # texts of the loss's own
            return self._model[0](features, **others)
        found = self.embeddings[features[ROW]]
        if self.leaves and torch.is_grad_enabled():
            self._read.append((features[ROW], found.requires_grad_()))
        return {**features, "sentence_embedding": found}

    def gradient(self) -> Tensor:
        """(texts, D)."""
        whole = torch.zeros_like(self.embeddings)
        for rows, found in self._read:
            if found.grad is not None:
                whole.index_add_(0, rows, found.grad)
        return whole

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattribute__("_model")[0], name)


def _losses(loss: nn.Module) -> Iterator[Any]:
    """A loss and those inside it."""
    return (each for _, each in losses_in(loss))


def _readers(loss: nn.Module) -> list[tuple[Any, str]]:
    """(a loss, what it calls its model) of the loss and those inside it."""
    named = ((each, name) for each in _losses(loss) for name in MODELS)
    return [(each, name) for each, name in named if isinstance(getattr(each, name, None), nn.Module)]


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
