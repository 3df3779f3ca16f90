"""The one command, ``raoe-train JOB [RECIPE] [--section.key value …]``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from raoe_train.config import JOBS
from raoe_train.job_table import run
from raoe_train.recipe import keys, shipped


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 0 only if the job did all it was asked."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0 if words else 2
    job, rest = words[0], words[1:]
    if job in JOBS and any(word in ("-h", "--help") for word in rest):
        print(_job_help(job))
        return 0
    debug = "--traceback" in rest
    rest = [word for word in rest if word != "--traceback"]
    # It says at import that an optional kernel of its own is not installed, which is nothing to act on.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        _hide_bars()
    recipe = None
    if rest and not rest[0].startswith("--"):
        if field := getattr(JOBS.get(job), "WORDS", None):
            rest.insert(0, f"--{field}")
        else:
            recipe = rest.pop(0)
    try:
        result = run(job, recipe, **parse_options(rest))
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ModuleNotFoundError, FloatingPointError) as error:
        # no file, a full disk, no such model, a loss that is NaN
        if debug:
            raise
        print(f"raoe-train: {_explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("raoe-train: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 1 if isinstance(result, dict) and result.get("failed") else 0


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """``--key value …`` as a mapping: no value is True, several or repeated ones are a list."""
    options: dict[str, Any] = {}
    key = None
    given: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            given.setdefault(key.replace("-", "_"), []).extend([value] if equals else [])
            key = key.replace("-", "_")
        elif key is None:
            raise ValueError(f"expected --section.key, got {word!r}")
        else:
            given[key].append(word)
    for key, values in given.items():
        options[key] = True if not values else values[0] if len(values) == 1 else values
    return options


def _hide_bars() -> None:
    """No progress bars of the libraries' where nobody watches. They read these on being imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("raoe_"):
        extra = "eval" if error.name == "mteb" else "train"
        return f"{error.name} is not installed; pip install 'raoe[{extra}]' brings what raoe-train needs"
    return str(error) or type(error).__name__


def _help() -> str:
    names, sweeps = (", ".join(shipped(job)) for job in ("train", "sweep"))
    lines = [
        "usage: raoe-train JOB [RECIPE] [--section.key value …]",
        "",
        "JOB is one of:",
        *(f"  {job:<9} {config.__doc__}" for job, config in JOBS.items()),
        "",
        f"RECIPE is a YAML file, or one of: {names}",
        f"of a sweep: {sweeps}",
        "",
        "raoe-train JOB --help lists the job's keys. --traceback shows where an error comes from.",
    ]
    return "\n".join(lines)


def _job_help(job: str) -> str:
    words = getattr(JOBS[job], "WORDS", "")
    first = f"{words.upper()}…" if words else "[RECIPE]"
    lines = [f"usage: raoe-train {job} {first} [--section.key value …]", "", str(JOBS[job].__doc__), ""]
    for key, _, default, text in keys(JOBS[job]):
        lines.append(f"  --{key:<28} {text} [{default if default not in ([], {}) else '-'}]")
    return "\n".join(lines)
