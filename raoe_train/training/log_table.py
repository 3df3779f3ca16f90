"""What a run says while it trains: a table, a progress bar where there is a terminal, and more for trackers."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from raoe_train.training.cost_meter import CostMeter
from raoe_train.training.plot import NOT_PARTS

SPEARMAN = "_spearman_cosine"
PER_SECOND = "_per_second"


class Reports:
    """Makes a trainer, transformers' Trainer or a subclass, print its log as a table in place of dictionaries, and give
    its callbacks, trackers among them, more than the log has: `class Reporting(Reports, Trainer)`.

    Attributes:
        meter: what the loop costs, a CostMeter.
    """

    def __init__(self: Any, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[misc]
        self.meter = _Meter(self)
        callbacks = self.callback_handler.callbacks
        callbacks.insert(0, self.meter)  # trackers are to see what it adds
        # the trainer's own comes last; one that was given stays, and so does a notebook's
        own = [each for each in callbacks if type(each) in (PrinterCallback, ProgressCallback)]
        if own:
            self.remove_callback(own[-1])
            self.add_callback(LogTable())

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        columns = [ids for key, ids in inputs.items() if key.endswith("input_ids")]
        self.meter.unit = "pairs" if len(columns) == 2 else "rows"
        self.meter.rows += len(columns[0]) if columns else 0
        self.meter.tokens += sum(ids.numel() for ids in columns)
        return super().training_step(model, inputs, *arguments, **settings)  # type: ignore[misc]

    def padding_saved(self) -> int:
        """Tokens of the batches since it was asked last that were not computed; to be overridden."""
        return 0


class _Meter(CostMeter):
    """Adds to what callbacks behind it are told at a logging step, since the last one and over all processes:
    "pairs_per_second" (of batches, without evaluation; "rows_per_second" of what are no pairs), "tokens" that the
    encoder read, padding included, "padding_saved", the share of the padded batches' tokens that it did not, and "tau"
    of the loss ("tau_NAME" by dataset). The trainer's own history stays as it is."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.args.device)
        self.trainer = trainer
        self.rows, self.tokens, self.unit, self.before = 0, 0, "rows", 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        counts = torch.tensor([self.rows, self.tokens, self.trainer.padding_saved()], device=args.device)
        rows, tokens, saved = self.trainer.accelerator.reduce(counts, "sum").tolist()
        seconds, self.before = self.seconds - self.before, self.seconds
        self.rows = self.tokens = 0
        if rows and seconds > 0:
            logs[self.unit + PER_SECOND] = rows / seconds
        if tokens:
            logs |= {"tokens": tokens - saved, "padding_saved": saved / tokens}
        scales = getattr(self.trainer, "scales", {})
        logs |= {"tau" if len(scales) == 1 else f"tau_{name}": scale for name, scale in scales.items()}


class LogTable(ProgressCallback):
    """A line for every step that is logged or evaluated; of transformers' bar, which it is, the bar alone.

    A line is printed when the next step begins: by then its evaluation is known. Spearman correlations are x 100.
    """

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[str] = []
        self.last: list[str] = []
        self.head: list[str] = []
        self.line: dict[str, str] = {}
        self.started: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.columns, self.last, self.head, self.line = [], [], [], {}
        self.started, self.first = time.monotonic(), state.global_step
        if sys.stderr.isatty() and not args.disable_tqdm:
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._say()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(self, *arguments: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            super().on_prediction_step(*arguments, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        if self.started is None:
            self.columns, self.last, self.head = [], [], []
            self._say()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._say()
        self.started = None
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        entry = state.log_history[-1] if state.log_history else {}
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            self._say()
            parts = [key for key in entry if key not in NOT_PARTS and not key.startswith("train_")]
            self.line = {"step": f"{state.global_step}", **{key: f"{entry[key]:.4g}" for key in ("loss", *parts)}}
            for key in logs:
                if key.endswith(PER_SECOND) and not key.startswith("train_"):
                    shown = f"{logs[key]:.3g}" if logs[key] < 100 else f"{logs[key]:.0f}"
                    self.line[f"{key.removesuffix(PER_SECOND)}/s"] = shown
            if self.started is not None and state.global_step > self.first:
                a_step = (time.monotonic() - self.started) / (state.global_step - self.first)
                self.line["left"] = tqdm.format_interval(a_step * (state.max_steps - state.global_step))
            if not self.columns:  # what evaluation will find has its place from the start
                metric = str(args.metric_for_best_model or "")
                dev = [_called(metric)] if args.eval_strategy != "no" and metric.startswith("eval_") else []
                self.columns = ["step", "loss", *parts, *dev]
        elif key := _measure(logs, args.metric_for_best_model):
            value = f"{100 * logs[key]:.2f}" if key.endswith(SPEARMAN) else f"{logs[key]:.4g}"
            self.line = {"step": f"{state.global_step}", **self.line, _called(key): value}

    def _say(self) -> None:
        """Print the line that is due, under a head where it has columns that none before it had."""
        if not self.line:
            return
        last = [key for key in self.line if key.endswith("/s") or key == "left"]
        self.columns = list(dict.fromkeys([*self.columns, *(key for key in self.line if key not in last)]))
        self.last = last or self.last
        head = [*self.columns, *self.last]
        lines = [self.line] if head == self.head else [{key: key for key in head}, self.line]
        with tqdm.external_write_mode():  # the bar steps aside
            for line in lines:
                print("  ".join(f"{line.get(key, ''):>{max(8, len(key))}}" for key in head), flush=True)
        self.line, self.head = {}, head


def _measure(logs: Mapping[str, Any], best: str | None) -> str | None:
    """What is shown of an evaluation: what the best checkpoint is chosen by, else a correlation, else a loss."""
    found = [key for key in logs if key.startswith("eval_")]
    wished = [best, *(key for key in found if key.endswith(SPEARMAN)), *(key for key in found if key.endswith("loss"))]
    return next((key for key in wished if key in found), None)


def _called(key: str) -> str:
    name = key.removeprefix("eval_").removesuffix(SPEARMAN)
    return "dev loss" if name == "loss" else name
