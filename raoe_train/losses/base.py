"""What all loss modules share: a scale, gradient caching, gathering, and keywords that recipes and cards know."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from raoe_train.losses.gathering import Gather
from raoe_train.losses.reads import SCORED_PAIRS, Reads
from raoe_train.recipe import Option

AUTO = "auto"
# what keywords of losses have to be: recipes check it, and their help says it
AboveZero = Annotated[float, Option(above=0)]
FromZero = Annotated[float, Option(least=0)]
Count = Annotated[int | None, Option(least=1)]
Scale = Annotated[float | Literal["auto"], Option(above=0)]
ENCODERS = ("model", "sentence_embedder", "guide")  # what losses call the encoders that they read


class CachedLoss(CachedLossMixin, nn.Module):
    """A loss module of sentence-transformers whose batch may be encoded piece by piece, and compared over processes.

    A subclass implements ``compute_loss_from_embeddings(embeddings, labels)``: the loss, (), of the (B, D) columns of a
    whole batch. Its constructor keeps each keyword as an attribute of the same name and hands the others on
    (``**cached``); so recipes, model cards and `with_scale` know them all, see settings_of.

    Args:
        model: the encoder.
        scale: what cosines (or angles) are multiplied by, above 0. "auto" fits it to encoder and scores, by source,
            where the loss reads scored pairs and raoe_train.Trainer trains it.
        mini_batch_size: encode so many rows at a time; the gradient is that of the whole batch.
        mini_batch_num_tokens: encode rows of at most so many tokens at a time, in place of mini_batch_size.
        gather_across_devices: compare over the batches of all processes; "uneven" where their sizes differ, see
            raoe_train.losses.

    Attributes:
        name: what recipes call it.
        reads: what it trains on.
        compares_batch: whether rows of a batch are compared with each other, so that batches of another size are
            another loss.

    Raises:
        ValueError: a scale not above 0 (or "auto" of a loss of no scores), a mini_batch_size or mini_batch_num_tokens
            below 1, or a gather_across_devices that is not True, False or "uneven".
    """

    name: ClassVar[str]
    reads: ClassVar[Reads]
    compares_batch = True
    cites: ClassVar[tuple[str, ...]] = ()  # keys of citations.bib

    def __init__(
        self,
        model: SentenceTransformer,
        scale: Scale = 20.0,
        *,
        mini_batch_size: Count = None,
        mini_batch_num_tokens: Count = None,
        gather_across_devices: Gather = False,
    ) -> None:
        super().__init__()
        fits = self.reads.name == SCORED_PAIRS.name
        if scale == AUTO and not fits:
            raise ValueError(f"scale 'auto' is measured on scored pairs; for loss {self.name} give a number: 20")
        if scale != AUTO and (isinstance(scale, str) or not 0 < scale < math.inf):
            words = " or 'auto'" if fits else ""
            raise ValueError(f"scale must be a number above 0 (20 is a temperature of 0.05){words}, got {scale!r}")
        for name, size in (("mini_batch_size", mini_batch_size), ("mini_batch_num_tokens", mini_batch_num_tokens)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {size!r}")
        if gather_across_devices not in (True, False, "uneven"):
            raise ValueError(
                f'gather_across_devices must be True, False or "uneven" (sizes differ), got {gather_across_devices!r}'
            )
        self.model = model
        self.scale: Any = scale
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = mini_batch_size is not None or mini_batch_num_tokens is not None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__signature__ = inspect.Signature([*_parameters(cls).values()])  # type: ignore[attr-defined, arg-type]

    @property
    def uneven(self) -> bool:
        """Whether processes tell each other how many rows they have."""
        return self.gather_across_devices == "uneven"

    @property
    def temperature(self) -> float:
        """1 / scale, as the literature on InfoNCE has it."""
        return 1.0 / self.current_scale

    @property
    def current_scale(self) -> Any:
        """The scale now, a number (or "auto"): another than `scale` where it is learned."""
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
            return with_own_gradients(self, lambda: self.forward_cached(features, beside))  # type: ignore[arg-type]
        return self.compute_loss_from_embeddings(embed_columns(self.model, features), **beside)

    def beside(self, features: list[dict[str, Tensor]], labels: Any) -> dict[str, Any]:
        """What compute_loss_from_embeddings is given beside the embeddings, made before the encoder sees the batch."""
        return {"labels": labels}

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Any = None) -> Any:
        raise NotImplementedError

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

    def with_scale(self, scale: float, **others: Any) -> Any:
        """This loss, of the same model, with another scale, and other keywords."""
        return type(self)(self.model, **{**self._settings(), "scale": scale, **others})

    def get_config_dict(self) -> dict[str, Any]:
        """All keywords, for the model card."""
        return {name: getattr(value, "__name__", value) for name, value in self._settings().items()}

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in settings_of(type(self))}


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


def settings_of(loss: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keywords of a loss by name, with annotation and default: those that it hands on to its base classes, too.

    What has no default (the model, a teacher's `embed`) is no setting.
    """
    return {name: each for name, each in _parameters(loss, True).items() if each.default is not inspect.Parameter.empty}


@functools.cache
def _parameters(loss: Callable[..., Any], evaluated: bool = False) -> dict[str, inspect.Parameter]:
    if not isinstance(loss, type):
        return dict(inspect.signature(loss, eval_str=evaluated).parameters)
    found: dict[str, inspect.Parameter] = {}
    for cls in loss.__mro__:
        if "__init__" not in vars(cls):
            continue
        own = [*inspect.signature(vars(cls)["__init__"], eval_str=evaluated).parameters.values()][1:]
        inherited = bool(found)
        for each in own:
            if each.name not in found and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                found[each.name] = each.replace(kind=each.KEYWORD_ONLY) if inherited else each
        if not any(each.kind is each.VAR_KEYWORD for each in own):
            break
    return found


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


def above_zero(**numbers: float) -> None:
    """ValueError for a number that is not above 0, infinite or NaN."""
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a number above 0, got {value!r}")
