"""The one command, ``raoe-train JOB [RECIPE] [--section.key value …]``, and the same from Python: ``run``."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raoe_train import recipe as recipes
from raoe_train.recipe import keys, nearest, shipped

DATA = ("prepare", "score", "lists", "mine", "generate")
JOBS = ("train", *DATA, "evaluate", "encode", "merge", "export", "check")
# what our extras bring, by the names that it is imported by
OURS = ("accelerate", "bitsandbytes", "datasets", "matplotlib", "pandas", "peft", "pyarrow", "scipy",
        "sentence_transformers", "sklearn", "transformers", "tqdm", "yaml")  # fmt: skip
EXTRAS = {**dict.fromkeys(OURS, "train"), "mteb": "eval"}
# the key that words before the first --key go to, where that is no recipe
WORDS = {"prepare": "names"}


def job_of(name: str) -> Callable[..., Any]:
    """The function of a job; ValueError for an unknown one."""
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}{nearest(name, JOBS)}; jobs: {', '.join(JOBS)}")
    return getattr(importlib.import_module(f"raoe_train.jobs.{name}"), name)


def load(job: str, recipe: str | Path | None = None, overrides: Any = None) -> Any:
    """The arguments of a job, see raoe_train.recipe.load."""
    return recipes.load(job_of(job), recipe, overrides)


def run(job: str, recipe: str | Path | None = None, **overrides: Any) -> Any:
    """Do a job and return what it wrote.

    Args:
        job: its name, see JOBS.
        recipe: a YAML path or the name of a shipped recipe.
        overrides: keys of the recipe, nested (``training={"epochs": 1}``) or dotted (``**{"training.epochs": 1}``).

    Raises:
        ValueError: an unknown job, recipe or key, a value that cannot be, or several processes for a job of one.
        OSError: a file that is not there or cannot be written, or a full disk; the message says what to do.
    """
    return job_of(job)(**vars(load(job, recipe, overrides)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. The exit status: 0 if the job did all it was asked; 1 if it came to its end and something is
    not as it should be (a check); 2 for what cannot be: a word, a value, a file, a full disk, a loss
    that is NaN; 3 for an error that nobody foresaw; 130 if it was interrupted, 141 if nobody reads what it prints."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a process that SIGPIPE ended


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(), flush=True)
        return 0 if words else 2
    # It says at import that an optional kernel of its own is not installed, which is nothing to act on.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    job, rest = words[0], words[1:]
    if job in JOBS and any(word in ("-h", "--help") for word in rest):
        print(_job_help(job), flush=True)
        return 0
    debug = "--traceback" in rest
    rest = [word for word in rest if word != "--traceback"]
    if not sys.stderr.isatty():
        _hide_bars()
    recipe, rest = recipe_of(job, rest)
    options: dict[str, Any] = {}
    try:
        options = parse_options(rest)
        result = run(job, recipe, **options)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("raoe-train: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        # no file, a full disk, no such model, a loss that is NaN, a model that memory does not hold
        known = isinstance(error, (ValueError, OSError, ImportError, FloatingPointError)) or _no_memory(error)
        said = _explain(error) if known else _unknown(error, options.get("output"))
        print(f"raoe-train: {said}", file=sys.stderr)
        return 2 if known else 3
    return 1 if isinstance(result, dict) and result.get("failed") else 0


def _unknown(error: Exception, output: Any) -> str:
    """An error that nobody foresaw in a sentence, and the file that has all of it: beside the output, where one can be
    written there."""
    trace = "".join(traceback.format_exception(error))
    beside = Path(f"{output}.error.txt") if isinstance(output, str) else None
    try:
        if beside is None or not beside.parent.is_dir():
            raise OSError
        beside.write_text(trace, encoding="utf-8", errors="backslashreplace")
    except OSError:
        handle, name = tempfile.mkstemp(".txt", "raoe-train-")
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
        beside = Path(name)
    said = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {said or 'no more is known'} (unforeseen; the whole trace is in {beside})"


def recipe_of(job: str, words: list[str]) -> tuple[str | None, list[str]]:
    """(the recipe that a job's words begin with, if they do; its options): of some jobs the first word is a key's."""
    if not words or words[0].startswith("--"):
        return None, words
    return (None, [f"--{WORDS[job]}", *words]) if job in WORDS else (words[0], words[1:])


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """``--key value …`` as a mapping: no value is True, several are a list; ValueError for a key twice."""
    given: dict[str, list[str]] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            if key in given:
                raise ValueError(f"--{key} is there twice; several values stand behind one: --{key} A B")
            given[key] = [value] if equals else []
        elif key is None:
            raise ValueError(f"expected --section.key, got {word!r}")
        else:
            given[key].append(word)
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in given.items()}


def _hide_bars() -> None:
    """No progress bars of the libraries' where nobody watches. They read these on being imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed; pip install 'raoe[{EXTRAS[error.name]}]' brings what raoe-train needs"
    if _no_memory(error):
        said = str(error).partition("\n")[0][:200]
        return f"memory is too small for it: smaller batches need less, or a smaller model ({said})"
    return str(error) or type(error).__name__


def _no_memory(error: Exception) -> bool:
    said = str(error)
    return isinstance(error, MemoryError) or "out of memory" in said or "can't allocate memory" in said


def _help() -> str:
    jobs = "\n".join(f"  {job:<9} {_summary(job)}" for job in JOBS)
    return f"""usage: raoe-train JOB [RECIPE] [--section.key value …]

JOB is one of:
{jobs}

RECIPE is a YAML file, or one of: {", ".join(shipped())}

raoe-train JOB --help lists the job's keys. --traceback shows where an error comes from.

exit status: 0 done, 1 something failed in a job that came to its end, 2 what cannot be, 3 an unforeseen error,
130 interrupted"""


def _job_help(job: str) -> str:
    first = f"{WORDS[job].upper()}…" if job in WORDS else "[RECIPE]"
    lines = [f"usage: raoe-train {job} {first} [--section.key value …]", "", _summary(job), ""]
    for key, default, text in keys(job_of(job)):
        lines.append(f"  --{key:<28} {text} [{default if default not in ([], {}) else '-'}]")
    return "\n".join(lines)


def _summary(job: str) -> str:
    return str(job_of(job).__doc__).partition("\n")[0]
