"""Runs of ``raoe-train train`` that take a second."""

from __future__ import annotations

from pathlib import Path

from sentence_transformers import SentenceTransformerTrainingArguments

from tests.tiny import SENTENCES

SCRATCH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "vocab_size": 200}  # fmt: skip
# a process that trains the recipe of its first argument, and is killed after the step of the second, in the fold of the
# third, if there is one
KILLED = """
import os, sys
import raoe_train as rt
from raoe_train.training.callbacks import LogFile

def on_step_end(self, args, state, control, **kwargs):
    if state.global_step == int(sys.argv[2]) and self.fold == int([*sys.argv, 0][3]):
        os._exit(9)

LogFile.on_step_end = on_step_end
rt.train(sys.argv[1])
"""


def write_pairs(path: Path, rows: int = 40, *, labels: bool = True, scale: float = 5.0) -> str:
    """Pairs whose score falls with the distance of their sentences in the list."""
    count = len(SENTENCES)
    lines = ["sentence1\tsentence2\tscore" + ("\tlabel" if labels else "")]
    for row in range(rows):
        first, step = row % count, (row * 7 // count) % count
        score = scale * (1 - step / count)
        label = ("entailment", "neutral", "contradiction")[3 * step // count]
        cells = [SENTENCES[first], SENTENCES[(first + step) % count], f"{score:.3f}", *([label] if labels else [])]
        lines.append("\t".join(cells))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def arguments(folder: Path, **changes):
    """Of sentence-transformers' or our Trainer: an epoch on the CPU."""
    options = {"output_dir": str(folder / "checkpoints"), "num_train_epochs": 1, "per_device_train_batch_size": 8,
               "learning_rate": 1e-3, "report_to": "none", "use_cpu": True, "save_strategy": "no", "seed": 7,
               "disable_tqdm": True}  # fmt: skip
    return SentenceTransformerTrainingArguments(**{**options, **changes})


def settings(folder: Path, **changes):
    options = {
        "model.name": "scratch",
        "model.device": "cpu",
        "model.scratch": SCRATCH,
        "model.max_seq_length": 16,
        "data.train": [write_pairs(folder / "train.tsv")],
        "data.dev": write_pairs(folder / "dev.tsv", rows=24),
        "training": {"num_train_epochs": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-3,
                     "logging_steps": 2},
        "output": str(folder / "out"),
    }  # fmt: skip
    return {**options, **changes}


def saving(folder: Path, every: int, **changes):
    """Without a dev set, with a checkpoint after so many steps."""
    options = settings(folder, **{"data.dev": None, **changes})
    options["training"] |= {"save_strategy": "steps", "save_steps": every}
    return options
