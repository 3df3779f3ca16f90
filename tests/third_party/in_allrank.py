"""allRank's listMLE, over our op. Its package is not imported: it wants torchvision and Google's cloud."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from raoe_kernels import list_mle_loss

PADDED_Y_VALUE, DEFAULT_EPS = -1, 1e-10  # theirs


def listMLE(y_pred: Any, y_true: Any, eps: float = DEFAULT_EPS, padded_value_indicator: float = PADDED_Y_VALUE) -> Any:
    return list_mle_loss(y_pred, y_true, scale=1, mask=y_true != padded_value_indicator)


for name in ("allrank", "allrank.models", "allrank.models.losses", "allrank.data", "allrank.data.dataset_loading"):
    sys.modules[name] = ModuleType(name)
vars(sys.modules["allrank.models.losses"]).update(listMLE=listMLE, DEFAULT_EPS=DEFAULT_EPS)
vars(sys.modules["allrank.data.dataset_loading"]).update(PADDED_Y_VALUE=PADDED_Y_VALUE)
