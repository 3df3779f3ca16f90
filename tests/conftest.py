"""What has to be so before any test is imported, and what tests of several rooms use."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # The kernels' tests run Triton's interpreter, and triton reads this as it is imported, which sentence-transformers
    # does too.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def drawn(monkeypatch):
    """The figures as they are saved."""
    from raoe_train.artifacts import figures

    made, real = [], figures.save
    monkeypatch.setattr(figures, "save", lambda figure, path: (made.append(figure), real(figure, path)))
    return made
