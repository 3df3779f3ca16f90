"""Replaces sentence-transformers' losses of pairs and of in-batch negatives by ours."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import sentence_transformers.sentence_transformer.losses as theirs
import torch
from sentence_transformers import util
from small_models import encoder, pytest_fixture_setup  # noqa: F401  (a hook of this plugin, too)

from raoe_train.losses import AnglELoss, CoSENTLoss, GISTLoss, InfoNCELoss

# Tests of their internals, by a part of the name.
INSIDE = {
    "test_gather_rank1": "replaces its all_gather; ours is tested by real processes",
    "test_cmnrl_gather_across_devices_offset": "replaces its all_gather; ours is tested by real processes",
    "test_positive_mask_protects": "captures the logits that it hands to CrossEntropyLoss; ours never have all of them",
    "test_relative_margin_negative_positive_score": "captures the logits that it hands to CrossEntropyLoss",
    "test_cached_gist_replays_dropout": "looks at its embed_minibatch, which runs the guide, too",
    "test_gradcache_under_autocast": "asks for a loss in bfloat16 to have a premise; ours is float32",
    "test_cmnrl_attributes_and_config": "its attributes, its words in an error",
    "test_cmnrl_hyperparameters_stay_assignable": "assigns similarity_fct; ours has the cosine alone",
    "test_non_positive_budget_rejected": "its words in an error: ours name the argument, too",
    "test_cached_gist_rejects_static": "its words in an error; its guide",
    "TestCreateMinibatchMixedModality": "of its slicing of images, nothing of ours; and of its version",
}


class MultipleNegativesRankingLoss(InfoNCELoss):
    def __init__(self, model: Any, scale: float = 20.0, similarity_fct: Any = util.cos_sim, **form: Any) -> None:
        if similarity_fct is not util.cos_sim:
            pytest.skip("ours has the cosine alone, no similarity_fct")
        super().__init__(model, scale, mask_duplicates=False, **form)


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    def __init__(self, model: Any, scale: float = 20.0, similarity_fct: Any = util.cos_sim, mini_batch_size: int = 32,
                 **form: Any) -> None:  # fmt: skip
        form.pop("show_progress_bar", None)
        super().__init__(model, scale, similarity_fct, mini_batch_size=mini_batch_size, **form)


class GISTEmbedLoss(GISTLoss):
    """Their guide reads the model's tokens; ours reads texts, here row numbers."""

    def __init__(self, model: Any, guide: Any, temperature: float = 0.01, **form: Any) -> None:
        super().__init__(model, self._asked, 1 / temperature, mask_duplicates=False, **form)
        self.guide = guide

    def forward(self, sentence_features: Any, labels: Any = None) -> Any:
        columns = [copy.copy(column) for column in sentence_features]
        with torch.no_grad():
            self._found = torch.cat([self.guide(copy.copy(c))["sentence_embedding"] for c in columns]).cpu().numpy()
        rows = len(self._found) // len(columns)
        return super().forward(columns, {"texts": [[""] * rows] * len(columns)})

    def _asked(self, texts: Any) -> Any:
        return self._found


class CachedGISTEmbedLoss(GISTEmbedLoss):
    def __init__(
        self, model: Any, guide: Any, temperature: float = 0.01, mini_batch_size: int = 32, **form: Any
    ) -> None:
        super().__init__(model, guide, temperature, mini_batch_size=mini_batch_size, **form)


ours: dict[str, Any] = {
    each.__name__: each
    for each in (
        MultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss, GISTEmbedLoss, CachedGISTEmbedLoss,
        CoSENTLoss, AnglELoss,
    )
}  # fmt: skip
ours["MultipleNegativesSymmetricRankingLoss"] = functools.partial(MultipleNegativesRankingLoss, symmetric=True)
ours["CachedMultipleNegativesSymmetricRankingLoss"] = functools.partial(
    CachedMultipleNegativesRankingLoss, symmetric=True
)
for name, loss in ours.items():
    assert hasattr(theirs, name)
    setattr(theirs, name, loss)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        if "test_cmnrl_same_grad" in item.name:  # which loads distilbert by itself
            item.module.SentenceTransformer = lambda name: copy.deepcopy(encoder())
        for part, why in INSIDE.items():
            if part in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=why))
