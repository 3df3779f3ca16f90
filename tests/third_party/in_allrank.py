"""allRank's listMLE and listNet, over our ops."""

from __future__ import annotations

from typing import Any

import allrank.models.losses as theirs

from raoe_kernels import list_mle_loss, list_net_loss


def listMLE(y_pred: Any, y_true: Any, eps: float = 0.0, padded_value_indicator: float = -1) -> Any:
    return list_mle_loss(y_pred, y_true, tau=1, mask=y_true != padded_value_indicator)


def listNet(y_pred: Any, y_true: Any, eps: float = 0.0, padded_value_indicator: float = -1) -> Any:
    return list_net_loss(y_pred, y_true, tau=1, teacher_tau=1, mask=y_true != padded_value_indicator)


theirs.listMLE, theirs.listNet = listMLE, listNet
