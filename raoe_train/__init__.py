"""Train sentence encoders with ranking and angular losses: the front door.

    import raoe_train as rt

`load_encoder`, `read_pairs`, `Trainer` and `losses` are for a script of one's own; `score`, `generate`, `mine`,
`encode` and `evaluate` are jobs of the command line, whose arguments are the keys of recipes; `run` does any job by its
name. docs/python.md shows each of them. Nothing is done on import: what a name needs is imported on its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_train import losses
    from raoe_train.cli import run
    from raoe_train.data.pairs import read_pairs
    from raoe_train.encoders.bidirectional import register
    from raoe_train.encoders.load import load_encoder
    from raoe_train.jobs.encode import encode
    from raoe_train.jobs.evaluate import evaluate
    from raoe_train.jobs.generate import generate
    from raoe_train.jobs.mine import mine
    from raoe_train.jobs.score import score
    from raoe_train.losses.collators import ListCollator, ScoreLabelCollator, TextCollator
    from raoe_train.training.trainer import Trainer

__all__ = [
    "ListCollator",
    "ScoreLabelCollator",
    "TextCollator",
    "Trainer",
    "encode",
    "evaluate",
    "generate",
    "load_encoder",
    "losses",
    "mine",
    "read_pairs",
    "register",
    "run",
    "score",
]
_HOMES = {
    "raoe_train.cli": ("run",),
    "raoe_train.data.pairs": ("read_pairs",),
    "raoe_train.encoders.bidirectional": ("register",),
    "raoe_train.encoders.load": ("load_encoder",),
    "raoe_train.jobs.encode": ("encode",),
    "raoe_train.jobs.evaluate": ("evaluate",),
    "raoe_train.jobs.generate": ("generate",),
    "raoe_train.jobs.mine": ("mine",),
    "raoe_train.jobs.score": ("score",),
    "raoe_train.losses.collators": ("ListCollator", "ScoreLabelCollator", "TextCollator"),
    "raoe_train.training.trainer": ("Trainer",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    if name == "losses":
        return importlib.import_module("raoe_train.losses")
    raise AttributeError(f"module 'raoe_train' has no attribute {name!r}")
