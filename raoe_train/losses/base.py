"""Base classes of all losses: their training data, scale, gradient caching and gathering across processes."""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from raoe_train.config import PositiveFloat, PositiveInt, convert
from raoe_train.losses.reads import Reads

ENCODERS = ("model", "sentence_embedder", "guide")  # attribute names of encoders in losses


class Loss(nn.Module, ABC):
    """A loss, named in recipes by its class or, for your own subclass, by its import path.

    The constructor takes the model, and keywords with types and defaults, which become keys in recipes.

    Attributes:
        reads: the training data that the loss needs.
        asks_teacher: whether the constructor takes `embed`, the frozen encoder of the section `teacher`.
    """

    reads: ClassVar[Reads]
    asks_teacher: ClassVar[bool] = False

    @classmethod
    def needs_label(cls, keywords: Mapping[str, Any]) -> bool:
        """Whether scored pairs must have NLI labels for a loss with these keywords."""
        return False


class CachedLoss(CachedLossMixin, Loss):
    """A sentence-transformers loss whose batch can be encoded in mini-batches and compared across processes.

    A subclass implements ``compute_loss_from_embeddings(embeddings, labels)``, which returns the scalar loss of the (B,
    D) columns of a whole batch. The constructor of the subclass stores each keyword as an attribute, for model cards.

    Args:
        model: the encoder.
        scale: inverse temperature, which multiplies cosines (or angles); 20 is a temperature of 0.05
        mini_batch_size: number of rows to encode at a time, to save memory; the gradient of the batch does not change
        mini_batch_num_tokens: maximum number of tokens to encode at a time; replaces mini_batch_size
        gather_across_devices: compare the texts of all processes; the batches of all processes must have equal size

    Raises:
        ValueError: scale, mini_batch_size or mini_batch_num_tokens is not above 0.
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
    ) -> None:
        super().__init__()
        if isinstance(model, str):
            raise TypeError(f"a loss needs an encoder, not its name: pass rt.load_encoder({model!r})")
        self.model = model
        self.scale: Any = convert("scale", scale, PositiveFloat)
        self.mini_batch_size = convert("mini_batch_size", mini_batch_size, PositiveInt | None)
        self.mini_batch_num_tokens = convert("mini_batch_num_tokens", mini_batch_num_tokens, PositiveInt | None)
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = self.mini_batch_size is not None or self.mini_batch_num_tokens is not None

    @property
    def current_scale(self) -> Any:
        """The current scale, which differs from `scale` if it is learned."""
        return self.scale

    @property
    def citation(self) -> str:
        """BibTeX entries of this loss's papers, for the model card."""
        texts = Path(__file__).with_name("citations.bib").read_text(encoding="utf-8").split("\n@")
        entries = {entry.partition("{")[2].partition(",")[0]: "@" + entry.strip("@\n") for entry in texts}
        return "\n" + "".join(f"{entries[key]}\n" for key in self.cites)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Any = None) -> Any:
        """Return the loss of a batch, (), or the parts of the loss by name.

        Args:
            sentence_features: tokenised columns, with B rows each.
            labels: labels from the collator of `reads`; see the docstring of the loss.
        """
        features = list(sentence_features)
        arguments = self.beside(features, labels)
        if self.uses_gradient_cache:
            if any("offsets" in column for column in features):
                raise ValueError("mini-batches do not work with a StaticEmbedding: leave mini_batch_size out")
            return with_own_gradients(self, lambda: self.forward_cached(features, arguments))  # type: ignore[arg-type]
        return self.compute_loss_from_embeddings(embed_columns(self.model, features), **arguments)

    def beside(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        """Return further arguments of compute_loss_from_embeddings, computed before the encoder reads the batch."""
        return {"labels": labels}

    @abstractmethod
    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        """Return the scalar loss of a batch's (B, D) columns, or the parts of the loss by name."""

    def calculate_loss(self, reps: list[list[Tensor]], labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """Hook of CachedLossMixin: return the loss of embeddings in mini-batches. labels: the result of `beside`."""
        loss = self.total(self.compute_loss_from_embeddings([torch.cat(column) for column in reps], **labels))
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def total(self, loss: Any) -> Tensor:
        """Return the scalar to differentiate when mini-batches are replayed."""
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """Return all keywords of the loss, for the model card."""
        constructors = [cls.__init__ for cls in type(self).__mro__ if issubclass(cls, CachedLoss)]
        names = [name for each in reversed(constructors) for name in inspect.signature(each).parameters]
        keywords = {name: getattr(self, name) for name in names if name != "model" and hasattr(self, name)}
        return {name: getattr(value, "__name__", value) for name, value in keywords.items()}


class OneSweep(CachedLoss):
    """A loss of cosines that can be summed over several Matryoshka widths (numbers of first dimensions). The value
    equals that of a MatryoshkaLoss around this loss. Time and memory are little more than for one width.

    Args:
        model, scale, cached: see CachedLoss.
        matryoshka_dims: numbers of first dimensions to train, in any order; the default trains only whole embeddings

    Attributes:
        dims: matryoshka_dims in ascending order, or None, as the ops of raoe_kernels require.
    """

    def __init__(
        self, model: Any, scale: PositiveFloat = 20.0, *, matryoshka_dims: Sequence[PositiveInt] = (), **cached: Any
    ) -> None:
        super().__init__(model, scale, **cached)
        widths = sorted(dims := convert("matryoshka_dims", matryoshka_dims, list[int]))
        size = getattr(model, "get_embedding_dimension", lambda: None)()
        if len(set(widths)) < len(widths) or not all(0 < width <= (size or width) for width in widths):
            limit = "" if size is None else f" up to the model's {size}"
            raise ValueError(f"matryoshka_dims must be distinct numbers from 1{limit}, got {dims}")
        if widths and size not in (None, widths[-1]):
            warnings.warn(f"matryoshka_dims {widths} lacks {size}: whole embeddings are not trained", stacklevel=2)
        self.matryoshka_dims = dims
        self.dims = tuple(widths) or None


def losses_in(loss: nn.Module, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (prefix, loss) for a loss (prefix "") and for all losses inside it (prefix "loss." …), without encoders."""
    yield where, loss
    for name, child in loss.named_children():
        if name not in ENCODERS:
            yield from losses_in(child, f"{where}{name}.")


def with_own_gradients(loss: nn.Module, cached: Callable[[], Tensor]) -> Tensor:
    """Run `cached`, which runs a backward pass and returns the scalar loss, and put the gradients of the loss's own
    parameters back into the graph. So factors of the loss (1/n in gradient accumulation, a gradient scaler) also apply
    to these gradients."""
    parameters = [parameter for _, each in losses_in(loss) for parameter in each.parameters(recurse=False)]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    value = cached()
    for parameter, old in zip(parameters, gradients, strict=True):
        gradient, parameter.grad = parameter.grad, old
        if gradient is not None:
            value = value + ((parameter - parameter.detach()) * gradient).sum()
    return value


def attach_gradient(parts: dict[str, Tensor], loss: Tensor) -> Any:
    """Return the parts of a loss by name. The first part gets the gradient of the whole loss, because only the sum of
    the parts has the hook that replays mini-batches."""
    values = {name: part.detach() for name, part in parts.items()}
    first = next(iter(values))
    return type(parts)({**values, first: values[first] + (loss - loss.detach())})
