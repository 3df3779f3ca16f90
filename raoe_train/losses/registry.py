"""The losses that recipes name, and their settings: those of each loss's signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_train.losses import library
from raoe_train.losses.angle_contrastive import AnglEContrastiveLoss
from raoe_train.losses.base import AUTO, settings_of
from raoe_train.losses.cosent import AnglELoss, CoSENTLoss
from raoe_train.losses.distillation import RankCSELoss, RankDistillationLoss, SimilarityDistillationLoss
from raoe_train.losses.gist import GISTLoss
from raoe_train.losses.infonce import InfoNCELoss
from raoe_train.losses.listmle import ListMLELoss
from raoe_train.losses.pearson import PearsonLoss
from raoe_train.losses.raoe import GatedAngularLoss, RankMarginLoss, RAOELoss
from raoe_train.losses.reads import SENTENCES_ALONE
from raoe_train.losses.sigmoid import SigmoidLoss
from raoe_train.recipe import UNDER, Option, Parameter, argument, declared, nearest, said_under, with_choices

OURS: tuple[Any, ...] = (
    RAOELoss,
    RankMarginLoss,
    GatedAngularLoss,
    CoSENTLoss,
    AnglELoss,
    PearsonLoss,
    InfoNCELoss,
    GISTLoss,
    SigmoidLoss,
    AnglEContrastiveLoss,
    ListMLELoss,
    SimilarityDistillationLoss,
    RankDistillationLoss,
    RankCSELoss,
    library.mse,
    library.triplet,
    library.contrastive,
    library.online_contrastive,
    library.softmax,
    library.multiple_negatives,
    library.CausalLM,
)
LOSSES: dict[str, Callable[..., Any]] = {loss.name: loss for loss in OURS}
WIDTHS = Annotated[list[int], Option(least=1)]
DIMS = "matryoshka_dims"  # of every loss of an encoder: what does not take it itself is trained inside a MatryoshkaLoss


def register(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Let recipes name a loss; usable as a decorator.

    Args:
        loss: a class whose constructor takes the model and keywords with annotations and defaults, the recipe's keys;
            its errors (ValueError) begin with the keyword. It has the class attributes `name` and `reads` (see
            raoe_train.losses.reads). A subclass of CachedLoss or PairLoss has the rest.
    """
    LOSSES[loss.name] = loss  # type: ignore[attr-defined]
    return loss


def loss_settings(given: Any, key: str = "loss") -> dict[str, Any]:
    """What a recipe's section says of its loss: name (by default raoe), keywords of that loss and matryoshka_dims, each
    value of the type that the signature declares, with all defaults. `key` is the section's, for messages.

    None means not given. What lies under recipe.UNDER was said of another loss: it holds as far as this one has it.
    ValueError for no such loss, a key that no loss or not this one has, or a value that cannot be.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"{key} must be a mapping of keys, got {given!r}")
    said = {name: None if str(value).lower() in ("none", "null") else value for name, value in given.items()}
    earlier, name = said_under(said), said.pop("name", None) or RAOELoss.name
    said.pop(UNDER, None)
    for other in said:
        have = [loss for loss in LOSSES if other in loss_parameters(loss)]
        if not have:
            known = [f"{key}.{word}" for word in ("name", *_everything())]
            raise ValueError(f"unknown key {key}.{other}{nearest(f'{key}.{other}', known)}")
        if isinstance(name, str) and name in LOSSES and name not in have and said[other] is not None:
            raise ValueError(f"loss {name} has no {key}.{other}: {', '.join(have)} have it")
    if not isinstance(name, str) or name not in LOSSES:
        raise ValueError(f"{key}.name must be one of {', '.join(LOSSES)}, got {name!r}")
    chosen: dict[str, Any] = {"name": name}
    for each, parameter in loss_parameters(name).items():
        if each == "scale" and said.get(each) == AUTO and parameter.type is float:
            raise ValueError(f"{key}.scale 'auto' is measured on scored pairs; for loss {name} give a number: 20")
        if said.get(each) is not None:
            chosen[each] = argument(parameter, said[each], f"{key}.{each}")
        else:
            chosen[each] = _as_far(parameter, None if each in said else earlier.get(each))
    try:
        make_loss(chosen)
    except ValueError as error:
        raise ValueError(f"{key}.{error}") from None
    return chosen


def loss_keys(where: str) -> Iterator[tuple[str, Any, str]]:
    """(dotted key, default, help) of every key that some loss has, for the command line's help."""
    yield f"{where}name", RAOELoss.name, ", ".join(LOSSES)
    for key in _everything():
        text = "also train the first so many dimensions" if key == DIMS else _said(key)
        alike: dict[tuple[str, str], tuple[Any, list[str]]] = {}
        for loss in LOSSES:
            if found := loss_parameters(loss).get(key):
                of = str(found.default), with_choices(text, found)
                alike.setdefault(of, (found.default, []))[1].append(loss)
        for (_, said), (default, losses) in alike.items():
            yield where + key, default, f"{said} ({', '.join(losses)})"


def make_loss(chosen: Mapping[str, Any], model: Any = None, embed: Any = None) -> Any:
    """The loss of such settings (see loss_settings; the rest is by default), inside a MatryoshkaLoss where they say so
    and it has no `matryoshka_dims` itself; on no model, one to ask what it is. `embed` is the teacher's, of a loss that
    asks one."""
    made = LOSSES[chosen["name"]]
    sweeps = DIMS in settings_of(made)
    own = {name: chosen[name] for name in chosen if name != "name" and (name != DIMS or sweeps)}
    loss = made(model, embed=embed, **own) if asks_teacher(made) else made(model, **own)
    if chosen.get(DIMS) and chosen.get("memory_size"):
        raise ValueError(f"memory_size must be 0 with {DIMS}: it remembers cosines of one width")
    if chosen.get(DIMS) and made is library.softmax:
        raise ValueError(f"{DIMS} must be left out of loss softmax, whose classifier reads the whole embedding")
    loss.reads, loss.compares_batch = made.reads, getattr(made, "compares_batch", False)  # type: ignore[attr-defined]
    if model is None or sweeps or not chosen.get(DIMS):
        return loss
    return MatryoshkaLoss(model, loss, chosen[DIMS])


def asks_teacher(loss: Callable[..., Any]) -> bool:
    """Whether a loss asks the encoder of the section `teacher` in every batch."""
    return "embed" in inspect.signature(loss).parameters


def loss_parameters(name: str) -> dict[str, Parameter]:
    """The keywords of a loss that a recipe can say."""
    loss = LOSSES[name]
    found = {
        key: declared(Any if each.annotation is each.empty else each.annotation, each.default)
        for key, each in settings_of(loss).items()
        if not callable(each.default)
    }
    dims = {DIMS: declared(WIDTHS, [])}
    return found if loss.reads is SENTENCES_ALONE else {**found, **dims}  # type: ignore[attr-defined]


def _everything() -> list[str]:
    listed = [key for name in LOSSES for key in loss_parameters(name)]
    return [*dict.fromkeys(key for key in listed if key != DIMS), DIMS]


def _as_far(parameter: Parameter, value: Any) -> Any:
    """What was said of another loss, or the default where this one cannot have it."""
    try:
        return argument(parameter, parameter.default if value is None else value, "")
    except ValueError:
        return argument(parameter, parameter.default, "")


def _said(key: str) -> str:
    """What the first docstring that has a keyword says of it."""
    for loss in LOSSES.values():
        for cls in getattr(loss, "__mro__", (loss,)):
            if found := re.search(rf"^ *{key}: (.+?)(?:[;.]|$)", inspect.getdoc(cls) or "", re.MULTILINE):
                return found[1]
    return key
