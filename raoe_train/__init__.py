"""raoe trains sentence-transformers models without computing padding.

    import raoe_train as rt

Use `load_encoder`, `read_pairs`, `Trainer`, `losses`, `calibrate` and `evaluate_model` in your own scripts. `train`,
`prepare`, `score`, `mine`, `generate`, `encode`, `evaluate`, `export` and `check` run the same jobs as the command
line. Each of these functions accepts a recipe and settings, both optional, as in ``rt.train("adapt", model={"name":
"..."}, output="out")``. `run` takes the name of a job as its first argument. See docs/python.md. Modules are imported
on first use, because importing torch is slow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raoe_kernels import __version__ as __version__
    from raoe_train import losses as losses
    from raoe_train.cli import run as run
    from raoe_train.data.pairs import read_pairs as read_pairs
    from raoe_train.encoders.bidirectional import register as register
    from raoe_train.encoders.load import load_encoder as load_encoder
    from raoe_train.jobs.evaluate import evaluate_model as evaluate_model
    from raoe_train.losses.collators import ListCollator as ListCollator
    from raoe_train.losses.collators import ScoreLabelCollator as ScoreLabelCollator
    from raoe_train.losses.collators import TextCollator as TextCollator
    from raoe_train.losses.pairs import calibrate as calibrate
    from raoe_train.training.trainer import Trainer as Trainer

    def train(recipe: Any = None, /, **settings: Any) -> dict[str, Any]:
        """Run a job; see docs/python.md."""
        raise NotImplementedError

    check = encode = evaluate = export = generate = mine = prepare = score = train

JOBS = ("check", "encode", "evaluate", "export", "generate", "mine", "prepare", "score", "train")
HOMES = {
    **dict.fromkeys(("ListCollator", "ScoreLabelCollator", "TextCollator"), "raoe_train.losses.collators"),
    "Trainer": "raoe_train.training.trainer",
    "__version__": "raoe_kernels",
    "calibrate": "raoe_train.losses.pairs",
    "evaluate_model": "raoe_train.jobs.evaluate",
    "load_encoder": "raoe_train.encoders.load",
    "losses": "",
    "read_pairs": "raoe_train.data.pairs",
    "register": "raoe_train.encoders.bidirectional",
    "run": "raoe_train.cli",
    **{job: f"raoe_train.jobs.{job}" for job in JOBS},
}
__all__ = [*HOMES]


if not TYPE_CHECKING:  # otherwise, type checkers would accept every attribute name

    def __getattr__(name: str) -> Any:
        if name not in HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = HOMES[name]
        return getattr(importlib.import_module(home), name) if home else importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
