"""Base classes and helpers for all losses: the data that a loss reads, gradient caching, named parts of a loss, and
gathering rows from all processes (whose batches must have equal size)."""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util.distributed import all_gather_with_grad, get_world_size
from torch import Tensor, nn

from raoe_train.config import PositiveFloat, PositiveInt, convert, keywords_of, nearest
from raoe_train.losses.collators import Reads

ENCODERS = ("model", "sentence_embedder", "guide")  # attribute names of encoders in losses


class LossParts(dict):
    """Named parts of one loss, each a differentiable scalar. The trainer adds up the parts and logs each of them.

    sentence-transformers' MatryoshkaLoss and AdaptiveLayerLoss multiply, divide and add losses,
    which a plain dict does not support. If a tensor is added, it becomes the part "others".
    """

    def __mul__(self, weight: Any) -> "LossParts":
        return LossParts({name: weight * part for name, part in self.items()})

    def __truediv__(self, number: Any) -> "LossParts":
        return self * (1 / number)

    def __add__(self, other: Any) -> "LossParts":
        if not isinstance(other, Mapping):  # a term from a wrapper, or the 0 that a sum starts with
            is_start = not torch.is_tensor(other) and other == 0
            other = {} if is_start else {"others": next(iter(self.values())).new_zeros(()) + other}
        names = {**self, **other}
        return LossParts({name: self.get(name, 0) + other.get(name, 0) for name in names})

    def detach(self) -> "LossParts":
        return LossParts({name: part.detach() for name, part in self.items()})

    __rmul__, __radd__ = __mul__, __add__


class Loss(nn.Module, ABC):
    """Base class of all losses. Recipes name a loss by its class name or, for your own subclass, by its import path.

    The constructor takes the model, and keyword arguments with types and defaults, which recipes can set.

    Attributes:
        reads: the training data that the loss needs.
        asks_teacher: whether the constructor takes `embed`, a function that encodes texts with the frozen teacher.
    """

    reads: ClassVar[Reads]
    asks_teacher: ClassVar[bool] = False

    def __call__(self, sentence_features: Iterable[Mapping[str, Any]], *labels: Any, **named: Any) -> Any:
        # DistributedDataParallel finds no tensors in a BatchEncoding and would treat every parameter as unused.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            sentence_features = [x if isinstance(x, dict) else dict(x) for x in sentence_features]
        return super().__call__(sentence_features, *labels, **named)

    @classmethod
    def needs_label(cls, keywords: Mapping[str, Any]) -> bool:
        """Return whether the loss with these keyword arguments needs NLI labels as well as scores."""
        return False


class CachedLoss(CachedLossMixin, Loss):
    """A loss that can encode its batch in mini-batches (gradient caching) and compare the texts of all processes.

    A subclass implements ``compute_loss_from_embeddings(embeddings, labels)``, which returns the scalar loss of a whole
    batch from the (B, D) embeddings of each column. The constructor of a subclass must store its keyword arguments as
    attributes, because the model card lists them.

    Args:
        model: the encoder.
        scale: inverse temperature, which multiplies cosines (or angles); 20 means a temperature of 0.05
        mini_batch_size: number of texts to encode at a time, to save memory; the gradient stays the same
        mini_batch_num_tokens: maximum number of tokens to encode at a time; replaces mini_batch_size
        gather_across_devices: compare the texts of all processes; the batches of all processes must have equal size

    Raises:
        ValueError: mini_batch_size or mini_batch_num_tokens is not positive. raoe_kernels checks the scale
            and other numbers when it computes the loss.
    """

    cites: ClassVar[tuple[str, ...]] = ()  # keys of the loss's papers in citations.bib

    def __init__(
        self,
        model: SentenceTransformer,
        scale: PositiveFloat = 20.0,
        *,
        mini_batch_size: PositiveInt | None = None,
        mini_batch_num_tokens: PositiveInt | None = None,
        gather_across_devices: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            name = min(unknown)
            hint = nearest(name, keywords_of(type(self)))
            raise TypeError(f"{type(self).__name__} has no argument {name!r}{hint}")
        if isinstance(model, str):
            raise TypeError(f"a loss needs a loaded encoder, got a name: pass rt.load_encoder({model!r})")
        self.model = model
        self.scale: Any = scale
        self.mini_batch_size = convert("mini_batch_size", mini_batch_size, PositiveInt | None)
        self.mini_batch_num_tokens = convert("mini_batch_num_tokens", mini_batch_num_tokens, PositiveInt | None)
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = self.mini_batch_size is not None or self.mini_batch_num_tokens is not None

    @property
    def citation(self) -> str:
        """BibTeX entries of this loss's papers, for the model card."""
        texts = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").split("\n@")
        entries = {entry.partition("{")[2].partition(",")[0]: "@" + entry.strip("@\n") for entry in texts}
        return "\n" + "".join(f"{entries[key]}\n" for key in self.cites)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Any:
        """Return the scalar loss of a batch, or a dict of the loss's named parts.

        Args:
            sentence_features: tokenized columns, with B rows each.
            labels: labels as returned by the collator `reads.collator`; see the docstring of the loss class.
        """
        features = list(sentence_features)
        prepared = self.prepare_labels(features, labels)
        # a StaticEmbedding has no rows of tokens to divide into mini-batches
        if not self.uses_gradient_cache or any("offsets" in column for column in features):
            columns = embed_columns(self.model, features)
            return self.compute_loss_from_embeddings(columns, **prepared)
        return cached(self, features, prepared)

    def prepare_labels(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        """Before the batch is encoded, return keyword arguments for compute_loss_from_embeddings."""
        return {"labels": labels}

    @abstractmethod
    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        """Return the scalar loss, or LossParts, from the (B, D) embeddings of each column."""

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """Hook of CachedLossMixin: compute the loss from the embeddings of all mini-batches. `labels`: see
        prepare_labels."""
        columns = [torch.cat(column) for column in reps]
        loss = scalar(self, self.compute_loss_from_embeddings(columns, **labels))
        return backward(loss) if with_backward else loss

    def get_config_dict(self) -> dict[str, Any]:
        """Return the keyword arguments of the loss and their values, for the model card."""
        constructors = [cls.__init__ for cls in type(self).__mro__ if issubclass(cls, CachedLoss)]
        names = [name for each in reversed(constructors) for name in inspect.signature(each).parameters]
        keywords = {name: getattr(self, name) for name in names if name != "model" and hasattr(self, name)}
        return {name: getattr(value, "__name__", value) for name, value in keywords.items()}


class OneSweep(CachedLoss):
    """A cosine-based loss that can be summed over Matryoshka widths (numbers of leading dimensions of an embedding).
    The sum equals the value of a MatryoshkaLoss around this loss, but needs only slightly more time and memory than a
    single width.

    Args:
        model, scale, **cached: arguments of CachedLoss.
        matryoshka_dims: numbers of leading dimensions to train, in any order; by default, only whole embeddings

    Attributes:
        dims: matryoshka_dims in ascending order, or None if empty; passed to raoe_kernels' ops as `dims`.
    """

    def __init__(
        self, model: Any, scale: PositiveFloat = 20.0, *, matryoshka_dims: Sequence[PositiveInt] = (), **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        widths = sorted(dims := convert("matryoshka_dims", matryoshka_dims, list[int]))
        size = getattr(model, "get_embedding_dimension", lambda: None)()
        if len(set(widths)) < len(widths) or not all(0 < width <= (size or width) for width in widths):
            limit = "" if size is None else f" up to the model's {size} dimensions"
            raise ValueError(f"matryoshka_dims must be distinct positive numbers{limit}, got {dims}")
        if widths and size not in (None, widths[-1]):
            lacks = f"matryoshka_dims {widths} do not include the model's {size} dimensions"
            warnings.warn(f"{lacks}, so whole embeddings are not trained", stacklevel=2)
        self.matryoshka_dims = dims
        self.dims = tuple(widths) or None


def gather_rows(own: Tensor) -> Tensor:
    """Gather the rows (B, ...) of all processes, ordered by process rank, into a tensor (processes * B, ...).

    In the backward pass, the process that owns a row receives the sum of the gradients that all processes computed for
    this row. If each process computes the mean loss over its own rows, or the same loss over all rows,
    DistributedDataParallel's average gradient is exactly the gradient of the whole batch.
    """
    if get_world_size() == 1:
        return own
    # flat, because torch's backward pass mixes up the rows of a transposed gradient (with gloo)
    rows = all_gather_with_grad(own.flatten())
    return rows.view(get_world_size() * len(own), *own.shape[1:])


def losses_in(loss: nn.Module, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (prefix of the module's parameter names, module) for a loss and all modules inside it, except encoders."""
    yield where, loss
    for name, child in loss.named_children():
        if name not in ENCODERS:
            yield from losses_in(child, f"{where}{name}.")


def without_modules(module: Any) -> Any:
    """Return a shallow copy of a module without submodules, weights, or methods overridden on the instance."""
    bare = object.__new__(type(module))
    own = {name: value for name, value in vars(module).items() if not (callable(value) and hasattr(type(module), name))}
    vars(bare).update(own | {name: dict.fromkeys(own[name]) for name in ("_modules", "_parameters", "_buffers")})
    return bare


def cached(loss: Any, features: list[Any], labels: Any) -> Any:
    """Compute a loss with its method `forward_cached`, which also runs a backward pass. Return the loss or, if the loss
    has named parts, these parts.

    The gradients of the loss's own parameters (such as a learned scale) are attached to the returned value. If the
    returned value is multiplied later (by 1/n in gradient accumulation, or by a gradient scaler), these gradients are
    therefore scaled by the same factor. If the loss has named parts, the gradient of the whole loss is attached to the
    first part, because the hook that replays mini-batches belongs to the sum of all parts.
    """
    parameters = [parameter for _, each in losses_in(loss) for parameter in each.parameters(recurse=False)]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    loss.parts = list[LossParts]()
    value = loss.forward_cached(features, labels)
    for parameter, old in zip(parameters, gradients, strict=True):
        gradient, parameter.grad = parameter.grad, old
        if gradient is not None:
            value = value + ((parameter - parameter.detach()) * gradient).sum()
    if len(loss.parts) != 1:  # no parts, or the parts of each width of a MatryoshkaLoss
        return value
    (parts,) = loss.parts
    first = next(iter(parts))
    return LossParts({**parts, first: parts[first] + (value - value.detach())})


def scalar(owner: Any, loss: Any) -> Tensor:
    """Return the scalar to differentiate: the loss, or the sum of its named parts (appended to `owner.parts`)."""
    if not isinstance(loss, dict):
        return loss
    owner.parts.append(LossParts(loss).detach())
    return torch.stack([*loss.values()]).sum()


def backward(loss: Tensor) -> Tensor:
    """Run the backward pass of a cached batch with autocast disabled, and return the detached loss."""
    with torch.autocast(loss.device.type, enabled=False):
        loss.backward()
    return loss.detach()
