"""Train sentence encoders with ranking and angular losses: the front door.

    import raoe_train as rt

`load_encoder`, `read_pairs`, `Trainer` and `losses` are for a script of one's own; `prepare`, `score`, `generate`,
`mine`, `encode` and `evaluate` are jobs of the command line, whose arguments are the keys of recipes; `run` does any of
them by its name; see docs/python.md. Nothing is done on import: what a name needs is imported on its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raoe_train.artifacts.lazy import exports

if TYPE_CHECKING:
    from raoe_train import losses as losses
    from raoe_train.cli import run as run
    from raoe_train.data.pairs import read_pairs as read_pairs
    from raoe_train.encoders.bidirectional import register as register
    from raoe_train.encoders.load import load_encoder as load_encoder
    from raoe_train.jobs.encode import encode as encode
    from raoe_train.jobs.evaluate import evaluate as evaluate
    from raoe_train.jobs.generate import generate as generate
    from raoe_train.jobs.mine import mine as mine
    from raoe_train.jobs.prepare import prepare as prepare
    from raoe_train.jobs.score import score as score
    from raoe_train.losses.accelerated import accelerate as accelerate
    from raoe_train.losses.collators import ListCollator as ListCollator
    from raoe_train.losses.collators import ScoreLabelCollator as ScoreLabelCollator
    from raoe_train.losses.collators import TextCollator as TextCollator
    from raoe_train.training.trainer import Trainer as Trainer

HOMES: dict[str, tuple[str, ...]] = {
    "cli": ("run",),
    "data.pairs": ("read_pairs",),
    "encoders.bidirectional": ("register",),
    "encoders.load": ("load_encoder",),
    "jobs.encode": ("encode",),
    "jobs.evaluate": ("evaluate",),
    "jobs.generate": ("generate",),
    "jobs.mine": ("mine",),
    "jobs.prepare": ("prepare",),
    "jobs.score": ("score",),
    "losses": (),
    "losses.accelerated": ("accelerate",),
    "losses.collators": ("ListCollator", "ScoreLabelCollator", "TextCollator"),
    "training.trainer": ("Trainer",),
}
__all__ = [name for home, names in HOMES.items() for name in names or (home,)]
__getattr__ = exports(__name__, HOMES)
