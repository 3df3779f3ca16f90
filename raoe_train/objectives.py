"""Which loss a recipe names: the class, its settings, and tau where that is to be found."""

from __future__ import annotations

import math
from typing import Any

from raoe_train.config import LossConfig

# loss.name: (class in raoe_train.losses, keys of LossConfig that it takes)
LOSSES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "raoe": ("RAOELoss", ("margin", "ties", "gate", "rank_weight", "angle_weight")),
    "rank_margin": ("RankMarginLoss", ("margin", "ties")),
    "gated_angular": ("GatedAngularLoss", ("gate",)),
    "cosent": ("CoSENTLoss", ()),
    "angle": ("AnglELoss", ()),
    "infonce": ("InfoNCELoss", ("symmetric", "mask_duplicates")),
    "listmle": ("ListMLELoss", ("ties",)),
    "mse": (None, ()),
    "causal_lm": (None, ()),
}
CAUSAL_LM = "causal_lm"  # no loss of an encoder: trains the decoder it is made of as a language model
OPTIONAL = tuple(dict.fromkeys(key for _, keys in LOSSES.values() for key in keys))
AUTO = "auto"  # of loss.scale


def takes_triplets(name: str) -> bool:
    """Whether a loss wants anchor, positive and negatives, and not scored pairs."""
    return name == "infonce"


def takes_lists(name: str) -> bool:
    """Whether a loss wants lists of sentences."""
    return name == "listmle"


def check_loss(chosen: LossConfig) -> None:
    """ValueError where the settings of a loss cannot be; a line for those that it does not have."""
    if chosen.name not in LOSSES:
        raise ValueError(f"loss.name must be one of {', '.join(LOSSES)}, got {chosen.name!r}")
    if chosen.name in ("mse", CAUSAL_LM) and (chosen.mini_batch_size or chosen.gather_across_devices):
        raise ValueError(
            f"loss.mini_batch_size and loss.gather_across_devices mean nothing to {chosen.name}, a mean over examples"
        )
    tau = chosen.scale
    if tau != AUTO and not (
        isinstance(tau, (int, float)) and not isinstance(tau, bool) and 0 < tau < math.inf
    ):
        raise ValueError(f"loss.scale must be a number > 0 or {AUTO!r}, got {tau!r}")
    if tau == AUTO and (takes_triplets(chosen.name) or takes_lists(chosen.name)):
        raise ValueError(f"loss.scale {AUTO!r} is measured on scored pairs; for loss {chosen.name} give a number: 20")
    if takes_lists(chosen.name) and chosen.ties not in (None, "ordinal", "random"):
        raise ValueError(f"loss.ties must be ordinal or random for loss {chosen.name}, got {chosen.ties!r}")
    taken = LOSSES[chosen.name][1]
    given = [key for key in OPTIONAL if getattr(chosen, key) is not None and key not in taken]
    if given:
        print(f"loss {chosen.name} has no {', '.join(given)}: ignored")


def make_losses(
    chosen: LossConfig, model: Any, datasets: Any, batch_size: int, seed: int
) -> tuple[Any, dict[str, float]]:
    """(the loss, or one for each source, and tau by source).

    With loss.scale "auto" each source has its own tau: how sharply scores order pairs is a property of them.
    """
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MatryoshkaLoss

    import raoe_train.losses as losses
    from raoe_train.calibration import calibrate

    name, keys = LOSSES[chosen.name]

    def make(scale: float) -> Any:
        settings = {key: getattr(chosen, key) for key in keys if getattr(chosen, key) is not None}
        return getattr(losses, str(name))(
            model,
            scale=scale,
            mini_batch_size=chosen.mini_batch_size,
            gather_across_devices=chosen.gather_across_devices,
            **settings,
        )

    def wrapped(loss: Any) -> Any:
        return MatryoshkaLoss(model, loss, chosen.matryoshka_dims) if chosen.matryoshka_dims else loss

    if name is None:
        return wrapped(CosineSimilarityLoss(model)), {}
    if chosen.scale != AUTO:
        return wrapped(make(float(chosen.scale))), dict.fromkeys(datasets, float(chosen.scale))
    by_source, scales = {}, {}
    for source, dataset in datasets.items():
        loss = make(1.0)
        loss.scale, means = calibrate(model, loss, dataset, batch_size=batch_size, seed=seed)
        by_source[source], scales[source] = wrapped(loss), loss.scale
        at_20 = means[min(means, key=lambda tau: abs(tau - 20))]
        print(f"{source}: scale {loss.scale:g} (loss before training {means[loss.scale]:.2f}; at 20 {at_20:.2f})")
    return by_source, scales
