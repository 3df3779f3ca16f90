"""Which loss a recipe names: the class, its settings, and tau where that is to be found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raoe_train.config import LossConfig, TeacherConfig


@dataclass(frozen=True)
class Objective:
    """A loss that a recipe can name.

    Attributes:
        reads: what it trains on: "scored pairs", "triplets", "lists", "labelled pairs" (1 similar, 0 not), "pairs"
            (each a positive one) or "sentences".
        keys: of LossConfig that it takes, of those in OPTIONAL.
        ours: the class in raoe_train.losses; None where it is sentence-transformers' own (or no encoder's).
        teacher: whether recipe section `teacher` is asked for every batch.
    """

    reads: str
    keys: tuple[str, ...] = ()
    ours: str | None = None
    teacher: bool = False


CAUSAL_LM = "causal_lm"  # no loss of an encoder: trains the decoder it is made of as a language model
LOSSES = {
    "raoe": Objective("scored pairs", ("margin", "ties", "gate", "rank_weight", "angle_weight"), "RAOELoss"),
    "rank_margin": Objective("scored pairs", ("margin", "ties"), "RankMarginLoss"),
    "gated_angular": Objective("scored pairs", ("gate",), "GatedAngularLoss"),
    "cosent": Objective("scored pairs", ours="CoSENTLoss"),
    "angle": Objective("scored pairs", ours="AnglELoss"),
    "infonce": Objective("triplets", ("symmetric", "mask_duplicates"), "InfoNCELoss"),
    "angle_contrastive": Objective(
        "triplets", ("symmetric", "mask_duplicates", "angle_weight"), "AnglEContrastiveLoss"
    ),
    "listmle": Objective("lists", ("ties",), "ListMLELoss"),
    "similarity_distillation": Objective("pairs", ours="SimilarityDistillationLoss", teacher=True),
    "rank_distillation": Objective("pairs", ours="RankDistillationLoss", teacher=True),
    "mse": Objective("scored pairs"),
    "triplet": Objective("triplets", ("margin", "distance")),
    "contrastive": Objective("labelled pairs", ("margin", "distance")),
    "online_contrastive": Objective("labelled pairs", ("margin", "distance")),
    "multiple_negatives": Objective("pairs"),
    CAUSAL_LM: Objective("sentences"),
}
OPTIONAL = tuple(dict.fromkeys(key for objective in LOSSES.values() for key in objective.keys))
OF_BATCHES = ("online_contrastive", "multiple_negatives")  # sentence-transformers' losses of a batch as a whole
DISTANCES = ("cosine", "euclidean")
AUTO = "auto"  # of loss.scale


def reads(name: str) -> str:
    """What a loss trains on, see Objective."""
    return LOSSES[name].reads


def check_loss(chosen: LossConfig) -> None:
    """ValueError where the settings of a loss cannot be; a line for those that it does not have."""
    if chosen.name not in LOSSES:
        raise ValueError(f"loss.name must be one of {', '.join(LOSSES)}, got {chosen.name!r}")
    ours = LOSSES[chosen.name].ours is not None
    if not ours and (chosen.mini_batch_size or chosen.gather_across_devices):
        raise ValueError(
            f"loss {chosen.name} has no loss.mini_batch_size and no loss.gather_across_devices: "
            + ("infonce has them" if chosen.name in OF_BATCHES else "its examples are on their own")
        )
    tau = chosen.scale
    if tau != AUTO and not (isinstance(tau, (int, float)) and not isinstance(tau, bool) and 0 < tau < math.inf):
        raise ValueError(f"loss.scale must be a number > 0 or {AUTO!r}, got {tau!r}")
    if tau == AUTO and reads(chosen.name) != "scored pairs":
        raise ValueError(f"loss.scale {AUTO!r} is measured on scored pairs; for loss {chosen.name} give a number: 20")
    if reads(chosen.name) == "lists" and chosen.ties not in (None, "ordinal", "random"):
        raise ValueError(f"loss.ties must be ordinal or random for loss {chosen.name}, got {chosen.ties!r}")
    if chosen.distance not in (None, *DISTANCES):
        raise ValueError(f"loss.distance must be one of {', '.join(DISTANCES)}, got {chosen.distance!r}")
    if not ours and chosen.margin is not None and not 0 <= chosen.margin < math.inf:
        raise ValueError(f"loss.margin must be a number from 0, got {chosen.margin!r}")
    taken = LOSSES[chosen.name].keys
    given = [key for key in OPTIONAL if getattr(chosen, key) is not None and key not in taken]
    if given:
        print(f"loss {chosen.name} has no {', '.join(given)}: ignored")


def make_losses(
    chosen: LossConfig, model: Any, datasets: Any, batch_size: int, seed: int, teacher: TeacherConfig | None = None
) -> tuple[Any, dict[str, float]]:
    """(the loss, or one for each source, and tau by source). `teacher` is that of losses which ask one in every batch.

    With loss.scale "auto" each source has its own tau: how sharply scores order pairs is a property of them.
    """
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    import raoe_train.losses as losses
    from raoe_train.losses.scale import calibrate

    objective = LOSSES[chosen.name]
    extra: dict[str, Any] = {"embed": _loaded_teacher(teacher)} if objective.teacher and teacher else {}

    def make(scale: float) -> Any:
        settings = {key: getattr(chosen, key) for key in objective.keys if getattr(chosen, key) is not None}
        return getattr(losses, str(objective.ours))(
            model,
            scale=scale,
            mini_batch_size=chosen.mini_batch_size,
            gather_across_devices=chosen.gather_across_devices,
            **extra,
            **settings,
        )

    def wrapped(loss: Any) -> Any:
        return MatryoshkaLoss(model, loss, chosen.matryoshka_dims) if chosen.matryoshka_dims else loss

    if objective.ours is None:
        return wrapped(library_loss(chosen, model)), {}
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


def _loaded_teacher(teacher: TeacherConfig) -> Any:
    from raoe_train.training.list_targets import embedder

    embed = embedder(teacher)
    embed(["."])  # loads it: that is to be no part of the first step's time
    return embed


def library_loss(chosen: LossConfig, model: Any) -> Any:
    """The loss of sentence-transformers that a recipe names, margin and distance its own where the recipe has none.

    Its own are, in version 6: of TripletLoss 5.0 and euclidean, of ContrastiveLoss and OnlineContrastiveLoss 0.5 and
    cosine.
    """
    from sentence_transformers.sentence_transformer import losses

    if chosen.name == "mse":
        return losses.CosineSimilarityLoss(model)
    if chosen.name == "multiple_negatives":
        return losses.MultipleNegativesRankingLoss(model, scale=float(chosen.scale))
    if chosen.name == "triplet":
        kind: Any = losses.TripletLoss
        margin, distance = "triplet_margin", losses.TripletDistanceMetric
        distances = {"cosine": distance.COSINE, "euclidean": distance.EUCLIDEAN}
    else:
        kind = losses.ContrastiveLoss if chosen.name == "contrastive" else losses.OnlineContrastiveLoss
        margin, siamese = "margin", losses.SiameseDistanceMetric
        distances = {"cosine": siamese.COSINE_DISTANCE, "euclidean": siamese.EUCLIDEAN}
    settings: dict[str, Any] = {} if chosen.margin is None else {margin: chosen.margin}
    if chosen.distance is not None:
        settings["distance_metric"] = distances[chosen.distance]
    return kind(model, **settings)
