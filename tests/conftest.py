"""What has to be so before any test is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # The kernels' tests run Triton's interpreter, and triton reads this as it is imported, which sentence-transformers
    # does too.
    os.environ["TRITON_INTERPRET"] = "1"
