"""Train RAOE sentence encoders: recipes over sentence-transformers, losses over raoe_kernels."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train.cli import run
    from raoe_train.losses.collators import ListCollator, ScoreLabelCollator, TextCollator

__all__ = ["ListCollator", "ScoreLabelCollator", "TextCollator", "run"]
# Imported on first use: sentence-transformers takes seconds.
_HOME = {
    "ListCollator": "raoe_train.losses.collators",
    "ScoreLabelCollator": "raoe_train.losses.collators",
    "TextCollator": "raoe_train.losses.collators",
    "run": "raoe_train.cli",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'raoe_train' has no attribute {name!r}")


# SentenceTransformer(DIR) is to load our decoders after `import raoe_train`. That takes transformers, which takes
# seconds, and so is left out where this is our own command: it registers them when it loads a model.
if sys.argv[:1] != ["-m"] and Path((sys.argv or [""])[0]).stem != "raoe-train":
    try:
        from raoe_train.encoders.bidirectional import register
    except ImportError:  # without the extra [train] there is nothing to load them with
        pass
    else:
        register()
