"""Trainer callbacks, which measure time and memory, print and write the log, save a checkpoint on SIGINT or SIGTERM,
and stop training with an error if the loss or the weights are NaN or infinite."""

import json
import logging
import math
import re
import resource
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback

from raoe_train.encoders.lengths import texts_of
from raoe_train.losses.collators import columns_of
from raoe_train.training.report import NOT_SHOWN, SELECTING

logger = logging.getLogger(__name__)
STATUS = Path("/proc/self/status")
EXTRA = "interrupted"  # file that marks a checkpoint written because of a signal
MAX_ROWS = 16  # maximum number of a batch's rows that an error message shows
LEFT = "weights became NaN or infinite after the optimizer step"
READ_LATE = ("cuda",)  # devices whose loss is read in a later step, so that the GPU does not wait for the host
IN_FLIGHT = 2  # number of steps whose losses may be unread when a step starts


class Meter(TrainerCallback):
    """Measures the training loop's peak memory, and its duration without evaluations and checkpoints.

    Log entries that later callbacks receive also contain the total speed of all processes since the last entry, as
    "pairs_per_second" or, for batches that are not pairs, "rows_per_second". These entries also contain the loss's
    "scale" or, with several datasets, "scale_NAME". The trainer's own log history is not changed.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.cuda = trainer.args.device.type == "cuda"
        self.seconds, self.first_seconds, self.peak = 0.0, 0.0, 0.0
        self.first_step, self.last_step = 0, 0
        self.rows, self.unit, self.logged = 0, "rows", 0.0
        self.total_rows, self.warned = 0, False
        self._since = 0.0

    def count(self, inputs: Mapping[str, Any]) -> None:
        columns = inputs["plan"].rows if "plan" in inputs else [v for k, v in inputs.items() if k.endswith("input_ids")]
        self.unit = "pairs" if len(columns) == 2 else "rows"
        rows = len(columns[0]) if columns else 0
        self.rows, self.total_rows = self.rows + rows, self.total_rows + rows

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = state.global_step  # more than 0 if a run resumes
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Evaluation and saving start right after this callback, and restart the clock when they finish.
        now = time.perf_counter()
        self.seconds += now - self._since
        if state.global_step == self.first_step + 1:
            self.first_seconds = self.seconds
        self._since = now

    on_epoch_end = on_step_end

    def _of_all_processes(self, count: int) -> int:
        return int(self.trainer.accelerator.reduce(torch.tensor(count, device=self.trainer.args.device), "sum"))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    on_save = on_evaluate

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.last_step, self.total_rows = state.global_step, self._of_all_processes(self.total_rows)
        self.peak = peak_mb(self.cuda)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        if logs["loss"] == 0 == logs.get("grad_norm") and not self.warned:
            logger.warning("the loss and its gradient are 0, so nothing is learned: batches may have too few rows, no "
                           "negatives, or equal scores")  # fmt: skip
            self.warned = True
        rows = self._of_all_processes(self.rows)
        seconds, self.logged = self.seconds - self.logged, self.seconds
        self.rows = 0
        if rows and seconds > 0:
            logs[f"{self.unit}_per_second"] = rows / seconds
        scales = self.trainer.scales
        logs |= {"scale" if len(scales) == 1 else f"scale_{name}": scale for name, scale in scales.items()}

    def costs(self) -> dict[str, Any]:
        """Return {"train_seconds", "train_steps", "train_rows", "peak_memory_mb"}. The first three count from the last
        start or resume."""
        return {
            "train_seconds": round(self.seconds, 3),
            "train_steps": self.last_step - self.first_step,
            "train_rows": self.total_rows,
            "peak_memory_mb": round(self.peak, 1),
        }


class LogLines(PrinterCallback):
    """Prints a line for every logged step and evaluation, with the remaining time. Replaces PrinterCallback."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.first = time.monotonic(), state.global_step
        super().on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs.pop("total_flos", None)  # as PrinterCallback does
        if not state.is_world_process_zero or not logs:
            return
        if "loss" in logs:
            entry = state.log_history[-1]  # unlike `logs`, it lacks values that other callbacks add for trackers
            hidden = ("epoch", "step", "grad_norm", "learning_rate")
            cells = [f"{name} {value:.4g}" for name, value in entry.items() if name not in hidden]
            cells += [f"{value:.4g} {name.removesuffix('_per_second')}/s" for name, value in logs.items()
                      if name.endswith("_per_second")]  # fmt: skip
            steps = state.global_step - self.first
            if steps > 0:
                left = (time.monotonic() - self.started) / steps * (state.max_steps - state.global_step)
                cells.append(f"{tqdm.format_interval(left)} left")
        else:
            cells = [f"{NOT_SHOWN.sub('', name)} {100 * value:.2f}"
                     for name, value in logs.items() if name.endswith(SELECTING)]  # fmt: skip
            cells += [f"loss {logs['eval_loss']:.4g}"] if "eval_loss" in logs else []
        if cells:
            print(f"step {state.global_step}/{state.max_steps}  {'  '.join(cells)}", flush=True)


class LogFile(TrainerCallback):
    """Writes the trainer's log as JSON lines. When a run resumes, lines that were logged after the checkpoint are
    removed. With folds, each line contains its fold number ("fold"), and the lines of earlier folds are kept."""

    def __init__(self, path: Path, fold: int = 0) -> None:
        self.path, self.fold = path, fold

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            earlier = []
            if self.fold and self.path.exists():
                lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
                earlier = [line for line in lines if json.loads(line)["fold"] < self.fold]
            self.path.write_text("".join([*earlier, *map(self._line, state.log_history)]), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self._line(state.log_history[-1]))

    def _line(self, entry: dict[str, Any]) -> str:
        # Leave out train_loss: in a resumed run, transformers divides the losses since the resume by all steps. Leave
        # out values that are always 0: rows per second of an evaluator, and operations (flos).
        always_0 = {key for key, value in entry.items() if not value and key.endswith(("_per_second", "_flos"))}
        kept = {key: value for key, value in entry.items() if key not in {"train_loss"} | always_0}
        return json.dumps({"fold": self.fold, **kept} if self.fold else kept) + "\n"


class Interruption(TrainerCallback):
    """Context manager: on SIGINT or SIGTERM, the trainer finishes the step, saves a checkpoint and stops with
    KeyboardInterrupt. A second signal stops the trainer at once. A resumed run deletes the interruption's checkpoint
    before it saves its next regular checkpoint, so it ends with the same checkpoints as an uninterrupted run. Signals
    have their usual effect if the trainer saves no checkpoints, or runs in several processes, which would not stop at
    the same step."""

    def __init__(self, args: Any) -> None:
        self.args, self.came, self.handlers = args, False, dict[int, Any]()

    def __enter__(self) -> None:
        can_save = self.args.world_size == 1 and self.args.save_strategy != "no"
        if can_save and threading.current_thread() is threading.main_thread():
            self.handlers = {each: signal.signal(each, self._note) for each in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _note(self, *_: Any) -> None:
        self.came = True
        self.__exit__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            for mark in Path(args.output_dir).glob(f"*/{EXTRA}"):
                shutil.rmtree(mark.parent)
        elif self.came and not float(state.epoch).is_integer():  # at the end of an epoch, an evaluation may follow
            args.save_total_limit, control.should_save = None, True
            mark = Path(args.output_dir, f"checkpoint-{state.global_step}", EXTRA)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.came:
            raise KeyboardInterrupt


class FiniteCheck(TrainerCallback):
    """Raises FloatingPointError if the loss or the weights are not finite, before the weights are saved or evaluated. A
    finite loss can have a gradient that is not finite. The weights are therefore checked too; otherwise, the error
    would name the step after the faulty one. The trainer calls `start` before each step and `read` after each step.

    This callback also clears the gradients of the loss's own parameters, because sentence-transformers versions before
    6.2 do not clear these gradients.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.batch: Any = None  # batch of the current or last step
        self.before: Any = None  # batch of the previous step
        self.unread = deque[Any]()  # (step, batch, loss, event) of steps whose losses are read late

    def start(self, batch: Mapping[str, Any]) -> None:
        """Store the batch of a step, and check the losses of earlier steps that have been copied to the CPU."""
        self.before, self.batch = self.batch, dict(batch)
        self._read_late(IN_FLIGHT)

    def read(self, loss: Tensor) -> None:
        """Check that the step's loss is finite, either at once or, on CUDA, when a later step starts."""
        step = self.trainer.state.global_step + 1
        if loss.device.type in READ_LATE:
            copy = torch.empty_like(loss, device="cpu", pin_memory=loss.is_cuda).copy_(loss.detach(), non_blocking=True)
            event = torch.cuda.current_stream().record_event() if loss.is_cuda else None
            self.unread.append((step, self.batch, copy, event))
        elif not math.isfinite(loss):
            problem = f"the loss is {float(loss)}"
            if self.before is not None and not has_finite_weights(self.trainer.model):
                raise not_finite(self.trainer, step - 1, f"{LEFT} (in the next step, {problem})", self.before)
            raise not_finite(self.trainer, step, problem, self.batch)

    def _read_late(self, most: int) -> None:
        """Check the oldest losses until at most `most` are left, then all losses that are already on the CPU."""
        while self.unread and (len(self.unread) > most or self.unread[0][3] is None or self.unread[0][3].query()):
            step, batch, value, event = self.unread.popleft()
            if event is not None:
                event.synchronize()
            if not math.isfinite(value):
                raise not_finite(self.trainer, step, f"the loss is {float(value)}", batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].zero_grad()
        if state.global_step >= state.max_steps or control.should_save or control.should_evaluate:
            self.on_epoch_end(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read_late(0)
        if not has_finite_weights(self.trainer.model):
            raise not_finite(self.trainer, state.global_step, LEFT, self.batch)


def has_finite_weights(model: Any) -> bool:
    return all(bool(torch.isfinite(weight).all()) for weight in model.parameters() if weight.requires_grad)


def not_finite(trainer: Any, step: int, problem: str, batch: Mapping[str, Any]) -> FloatingPointError:
    """Return the error for a step whose loss or weights are not finite. The message shows rows from the batch."""
    tokenizer = getattr(trainer.data_collator, "tokenizer", None) or trainer.model.tokenizer
    if "plan" in batch:
        texts = texts_of(batch["plan"].runs)
        columns = [[texts[place] for place in rows[:MAX_ROWS].tolist()] for rows in batch["plan"].rows]
    else:
        columns = [texts_of([each])[:MAX_ROWS] for each in columns_of(dict(batch))[0] if "input_ids" in each]
    rows = ([tokenizer.decode(text)[:80] for text in texts] for texts in zip(*columns, strict=True))
    lines = ["  " + " | ".join(row) for row in rows]
    scales = "".join(f", loss.scale (now {scale:g})" for scale in dict.fromkeys(trainer.scales.values()))
    return FloatingPointError(
        "\n".join([f"step {step}: {problem}; the first rows of this step's batch, as the encoder reads them:", *lines])
        + f"\ntry a smaller training.learning_rate (now {trainer.args.learning_rate:g}){scales}, more warm-up, or "
        "training.bf16 instead of fp16, and check these rows for invalid scores and empty sentences"
    )


def write_events_to(trainer: Any, folder: Path) -> None:
    """Make TensorBoard write to `folder`, unless TensorBoard's environment variable sets another folder."""
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, TensorBoardCallback) and each.logging_dir is None:
            each.logging_dir = str(folder)


def peak_mb(cuda: bool) -> float:
    """Return the peak memory, in MB (10^6 bytes), of tensors on the CUDA device or, without CUDA, of this process."""
    if cuda:
        return torch.cuda.max_memory_allocated() / 1e6
    if STATUS.exists():  # ru_maxrss would include the peak of the parent process
        return int(re.findall(r"VmHWM:\s+(\d+)", STATUS.read_text())[0]) * 1024 / 1e6
    kilo = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo / 1e6
