"""allRank's listMLE and listNet, over our ops. Its package is not imported: it wants torchvision and Google's cloud."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from raoe_kernels import list_mle_loss, list_net_loss

PADDED_Y_VALUE, DEFAULT_EPS = -1, 1e-10  # theirs


def listMLE(y_pred: Any, y_true: Any, eps: float = DEFAULT_EPS, padded_value_indicator: float = PADDED_Y_VALUE) -> Any:
    return list_mle_loss(y_pred, y_true, tau=1, mask=y_true != padded_value_indicator)


def listNet(y_pred: Any, y_true: Any, eps: float = DEFAULT_EPS, padded_value_indicator: float = PADDED_Y_VALUE) -> Any:
    return list_net_loss(y_pred, y_true, tau=1, teacher_tau=1, mask=y_true != padded_value_indicator)


for name in ("allrank", "allrank.models", "allrank.models.losses", "allrank.data", "allrank.data.dataset_loading"):
    sys.modules[name] = ModuleType(name)
vars(sys.modules["allrank.models.losses"]).update(listMLE=listMLE, listNet=listNet, DEFAULT_EPS=DEFAULT_EPS)
vars(sys.modules["allrank.data.dataset_loading"]).update(PADDED_Y_VALUE=PADDED_Y_VALUE)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    import pytest

    for item in items:
        if item.name == "test_listnet_stable_for_very_small_prediction":
            why = "theirs adds 1e-10 to probabilities, so that no item costs more than 23; ours costs what it is"
            item.add_marker(pytest.mark.skip(reason=why))
