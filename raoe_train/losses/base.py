"""What all loss modules share: what they read, a scale, gradient caching and gathering."""

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from raoe_train.config import PositiveFloat, PositiveInt
from raoe_train.losses.reads import Reads

ENCODERS = ("model", "sentence_embedder", "guide")  # what losses call the encoders that they read


class Loss(nn.Module, ABC):
    """A loss that recipes can name: by its class name, or by its import path where it is somebody else's subclass.

    The constructor takes the model and keywords with types and defaults, which are the recipe's keys.

    Attributes:
        reads: the columns that it trains on.
        asks_teacher: whether the constructor takes `embed`, the frozen encoder of the section `teacher`.
    """

    reads: ClassVar[Reads]
    asks_teacher: ClassVar[bool] = False


class CachedLoss(CachedLossMixin, Loss):
    """A loss module of sentence-transformers whose batch may be encoded piece by piece, and compared over processes.

    A subclass implements ``compute_loss_from_embeddings(embeddings, labels)``: the loss, (), of the (B, D) columns of a
    whole batch. Its constructor keeps each keyword as an attribute of the same name, for model cards.

    Args:
        model: the encoder.
        scale: inverse temperature that cosines (or angles) are multiplied by; 20 is a temperature of 0.05
        mini_batch_size: encode so many rows at a time; the gradient is that of the whole batch
        mini_batch_num_tokens: encode rows of at most so many tokens at a time, in place of mini_batch_size
        gather_across_devices: compare over the batches of all processes, which have one size

    Raises:
        ValueError: a scale, mini_batch_size or mini_batch_num_tokens that is not above 0.
    """

    cites: ClassVar[tuple[str, ...]] = ()  # keys of citations.bib

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
            names = ", ".join(unknown)
            raise TypeError(f"{type(self).__name__} has no keyword {names}; what multiplies cosines is scale")
        if isinstance(model, str):
            raise TypeError(f"the model of a loss is an encoder: rt.load_encoder({model!r}), not its name")
        above_zero(scale=scale, mini_batch_size=mini_batch_size, mini_batch_num_tokens=mini_batch_num_tokens)
        self.model = model
        self.scale: Any = scale
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = mini_batch_size is not None or mini_batch_num_tokens is not None

    @property
    def current_scale(self) -> Any:
        """The scale now: another than `scale` where it is learned."""
        return self.scale

    @property
    def citation(self) -> str:
        """The papers of this loss as BibTeX, for the model card."""
        known = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").split("\n@")
        entries = {entry.partition("{")[2].partition(",")[0]: "@" + entry.strip("@\n") for entry in known}
        return "\n" + "".join(f"{entries[key]}\n" for key in self.cites)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Any:
        """The loss of a batch, (), or its parts by name.

        Args:
            sentence_features: tokenised columns, with B rows each.
            labels: what the collator of `reads` makes; see the class.
        """
        features = list(sentence_features)
        beside = self.beside(features, labels)
        if self.uses_gradient_cache:
            if any("offsets" in column for column in features):
                raise ValueError("a StaticEmbedding's batches cannot be cut: leave mini_batch_size out")
            return with_own_gradients(self, lambda: self.forward_cached(features, beside))  # type: ignore[arg-type]
        return self.compute_loss_from_embeddings(embed_columns(self.model, features), **beside)

    def beside(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        """What compute_loss_from_embeddings is given beside the embeddings, made before the encoder sees the batch."""
        return {"labels": labels}

    @abstractmethod
    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        """The loss, (), or its parts by name, of the (B, D) columns of a batch."""

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """CachedLossMixin's hook: the loss of a batch whose embeddings come in mini-batches; labels are `beside`."""
        loss = self.total(self.compute_loss_from_embeddings([torch.cat(column) for column in reps], **labels))
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def total(self, loss: Any) -> Tensor:
        """The one number that is differentiated where mini-batches are replayed."""
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """All keywords, for the model card."""
        constructors = [cls.__init__ for cls in type(self).__mro__ if issubclass(cls, CachedLoss)]
        names = [name for made in reversed(constructors) for name in inspect.signature(made).parameters]
        own = {name: getattr(self, name) for name in names if name != "model" and hasattr(self, name)}
        return {name: getattr(value, "__name__", value) for name, value in own.items()}


class OneSweep(CachedLoss):
    """A loss of cosines, summed over the first `matryoshka_dims` dimensions as a MatryoshkaLoss around it does, at
    little more than the time and memory of one.

    Args:
        model, scale, cached: see CachedLoss.
        matryoshka_dims: how many dimensions, increasing or not; none trains all of them, and no fewer.

    Attributes:
        dims: they, increasing, or None: what the ops take.
    """

    def __init__(
        self, model: Any, scale: PositiveFloat = 20.0, *, matryoshka_dims: Sequence[PositiveInt] = (), **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        widths = sorted(matryoshka_dims)
        size = getattr(model, "get_embedding_dimension", lambda: None)()
        if len(set(widths)) < len(widths) or not all(0 < width <= (size or width) for width in widths):
            most = "" if size is None else f" up to the model's {size}"
            raise ValueError(f"matryoshka_dims must be different numbers from 1{most}, got {list(matryoshka_dims)}")
        if widths and size not in (None, widths[-1]):
            warnings.warn(f"matryoshka_dims {widths} leave out all {size}, which are not trained", stacklevel=2)
        self.matryoshka_dims = list(matryoshka_dims)
        self.dims = tuple(widths) or None


def losses_in(loss: nn.Module, where: str = "") -> Iterator[tuple[str, Any]]:
    """(where, a loss) of a loss, "", and of those inside it, "loss." and so on; not of the encoders that they read."""
    yield where, loss
    for name, child in loss.named_children():
        if name not in ENCODERS:
            yield from losses_in(child, f"{where}{name}.")


def with_own_gradients(loss: nn.Module, cached: Callable[[], Tensor]) -> Tensor:
    """What `cached` gives: a loss, (), that was differentiated while it was made. Its gradients by the loss's own
    parameters become part of its graph, so that what is put before the loss (gradient accumulation's 1/n, a scaler's
    factor) is before them, too."""
    own = [parameter for _, each in losses_in(loss) for parameter in each.parameters(recurse=False)]
    before = [parameter.grad for parameter in own]
    for parameter in own:
        parameter.grad = None
    value = cached()
    for parameter, earlier in zip(own, before, strict=True):
        made, parameter.grad = parameter.grad, earlier
        if made is not None:
            value = value + ((parameter - parameter.detach()) * made).sum()
    return value


def carrying(parts: dict[str, Tensor], loss: Tensor) -> Any:
    """Parts of a loss by name, of which the first has the gradient of the whole: where mini-batches are replayed only
    the total carries the hook that does it."""
    values = {name: part.detach() for name, part in parts.items()}
    first = next(iter(values))
    return type(parts)({**values, first: values[first] + (loss - loss.detach())})


def from_zero(**numbers: float) -> None:
    """ValueError for a number below 0, infinite or NaN."""
    for name, value in numbers.items():
        if isinstance(value, str) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number from 0, got {value!r}")


def above_zero(**numbers: float | None) -> None:
    """ValueError for a number, where there is one, that is not above 0, infinite or NaN."""
    for name, value in numbers.items():
        if value is not None and (isinstance(value, str) or not 0 < value < math.inf):
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
