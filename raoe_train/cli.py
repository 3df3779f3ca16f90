"""The command ``raoe-train JOB [RECIPE] [--section.key value …]``, and the same from Python: ``run``."""

import importlib
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raoe_train.artifacts.processes import end_group

JOBS = {
    "train": "train an encoder on scored pairs, triplets, labelled pairs or lists",
    "prepare": "download public data sets and check their row counts",
    "score": "add similarity scores from two teacher encoders to pairs",
    "mine": "mine examples for contrastive losses from labelled texts",
    "generate": "generate chains of ranking sentences with a language model",
    "evaluate": "evaluate an encoder: similarity, transfer, captions, polarity, MTEB",
    "encode": "write the embeddings of the sentences of a file",
    "export": "save an encoder with its adapter merged in",
    "check": "check that embeddings do not depend on padding and batch size",
}
TRAIN_PACKAGES = ("accelerate", "datasets", "filelock", "jsonargparse", "matplotlib", "pandas", "peft", "pyarrow",
        "scipy", "sentence_transformers", "sklearn", "transformers", "tqdm", "yaml")  # fmt: skip
EXTRAS = {**dict.fromkeys(TRAIN_PACKAGES, "train"), "bitsandbytes": "4bit", "mteb": "eval"}  # {import name: extra}


def job_of(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function of a job; ValueError if no job has this name."""
    if name not in JOBS:
        import difflib

        close = difflib.get_close_matches(name, JOBS, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown job {name!r}{hint}; jobs: {', '.join(JOBS)}")
    return getattr(importlib.import_module(f"raoe_train.jobs.{name}"), name)


def load(job: str, recipe: str | Path | None = None, settings: Mapping[str, Any] | None = None) -> Any:
    """Create the configuration object of a job; see raoe_train.config.parse."""
    from raoe_train.config import parse

    return parse(job_of(job).config, recipe, settings)  # type: ignore[attr-defined]


def run(job: str, recipe: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Run a job and return its result.

    Args:
        job: name of the job, see JOBS.
        recipe: path of a YAML file, or the name of a shipped recipe.
        settings: keys that override it, nested (``training={"seed": 1}``) or dotted (``**{"training.seed": 1}``).

    Raises:
        ValueError: an unknown job, recipe or key, an invalid value or row, an output that exists with other settings,
            or several processes for a job that runs in one.
        OSError: a missing file, model or data set, a file that cannot be written, or a full disk.
    """
    return job_of(job)(recipe, **settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 finished with failures, 2 invalid input or a known
    problem (a full disk, a NaN loss), 3 unexpected error, 130 interrupted, 141 broken pipe."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal lacks must not end a run
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:  # such as a `head` that has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the shell's status for SIGPIPE


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help(), flush=True)
        return 0 if words else 2
    if "--version" in words[:2]:
        print(f"raoe {version('raoe')}", flush=True)
        return 0
    # At import it warns that one of its optional kernels is not installed; users need not act on that.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    job, rest = words[0], words[1:]
    debug = "--traceback" in rest
    rest = [word for word in rest if word != "--traceback"]
    if not sys.stderr.isatty():  # the libraries read these variables when they are imported
        for key in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
            os.environ.setdefault(key, "1")
    try:
        config = _config(job, rest)
        if config is None:
            return 0
        result = job_of(job)(config)
        end_group()
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("raoe-train: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        # invalid input, a missing file or package, a full disk, a NaN loss, out of memory
        is_known = isinstance(error, (ValueError, OSError, ImportError, FloatingPointError)) or _no_memory(error)
        print(f"raoe-train: {_explain(error) if is_known else _unexpected(error)}", file=sys.stderr)
        return 2 if is_known else 3
    return 1 if result.get("failed") else 0


def _config(job: str, words: list[str]) -> Any:
    """The configuration of a job's command line; None after printing what --help or --print_config asks for."""
    if job in JOBS and job != "prepare" and words and not words[0].startswith("-"):
        from raoe_train.config import recipe_path  # an unknown recipe is an error before anything heavy is imported

        words = ["--config", str(recipe_path(words[0])), *words[1:]]
    config = job_of(job).config  # type: ignore[attr-defined]
    from raoe_train.config import parse_words, parser_of, recipe_text

    if job == "prepare" and words and not words[0].startswith("-"):
        words = ["--names", *words]
    if any(word in ("-h", "--help") or word.partition("=")[0].endswith(".help") for word in words):
        essentials = getattr(sys.modules[config.__module__], "ESSENTIALS", "")
        description = f"{JOBS[job][0].upper()}{JOBS[job][1:]}.\n\n{essentials}".strip()
        try:
            parser_of(config, f"raoe-train {job}", description).parse_args(words)
        except SystemExit:  # argparse's, after help
            return None
    settings = parse_words(config, [word for word in words if word != "--print_config"])
    if "--print_config" in words:
        print(recipe_text(settings), end="")
        return None
    return settings


def _unexpected(error: Exception) -> str:
    """Describe an unexpected error in one sentence and write its traceback to a temporary file."""
    handle, name = tempfile.mkstemp(".txt", "raoe-train-")
    with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message} (unexpected error; the traceback is in {name})"


def _explain(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        return f"{error.name} is not installed: run pip install -e '.[{EXTRAS[error.name]}]' in a checkout of raoe"
    if _no_memory(error):
        reason = str(error).partition("\n")[0][:200]
        return f"out of memory: try --training.per_device_train_batch_size 32 or a smaller model ({reason})"
    return str(error) or type(error).__name__


def _no_memory(error: Exception) -> bool:
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)


def _help() -> str:
    recipes = ", ".join(path.stem for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml")))
    jobs = "\n".join(f"  {job:<9} {summary}" for job, summary in JOBS.items())
    return f"""usage: raoe-train JOB [RECIPE] [--config FILE] [--section.key VALUE ...]

jobs:
{jobs}

RECIPE is a YAML file, or one of: {recipes}

raoe-train JOB --help lists the settings of a job, --print_config prints them as a recipe, --traceback shows the
traceback of an error, --version prints the version.

exit status: 0 done, 1 finished with failures, 2 invalid input, 3 unexpected error, 130 interrupted"""
