"""The command ``raoe-train JOB [RECIPE] [--section.key VALUE …]``, and the equivalent Python function ``run``."""

import argparse
import importlib
import inspect
import json
import logging
import os
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raoe_train import config as cfg
from raoe_train.jobs import settings
from raoe_train.jobs.shared import check_paths, finished_result, output_of
from raoe_train.processes import end_group

JOBS = {
    "train": "train an encoder on scored pairs, triplets, labelled pairs or lists",
    "prepare": "download public data sets and check their row counts",
    "score": "add similarity scores from two teacher encoders to sentence pairs",
    "mine": "mine examples from labelled texts, or hard negatives for queries",
    "generate": "generate chains of ranking sentences with a language model",
    "evaluate": "evaluate an encoder: similarity, transfer, polarity, retrieval",
    "encode": "compute the embeddings of all sentences in a file",
    "export": "save an encoder with its LoRA adapter merged into the weights",
    "check": "check that embeddings do not depend on padding or batch size",
}
TRAIN_PACKAGES = ("accelerate", "datasets", "filelock", "matplotlib", "pandas", "peft", "pyarrow",
        "pydantic", "scipy", "sentence_transformers", "sklearn", "transformers", "tqdm", "yaml")  # fmt: skip
EXTRAS = {**dict.fromkeys(TRAIN_PACKAGES, "train"), "bitsandbytes": "4bit"}  # {import name: extra}
USAGE = "raoe-train JOB [RECIPE] [--config FILE] [--section.key VALUE ...]"
OPTIONS = ("config", "print_config", "traceback", "loss.help")  # options that are not settings
STATUS = "exit status: 0 done, 1 finished with failures, 2 invalid input, 3 unexpected error, 130 interrupted"


def job_of(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function that runs a job. Raise ValueError if no job has this name."""
    config_of(name)
    return getattr(importlib.import_module(f"raoe_train.jobs.{name}"), name)


def config_of(name: str) -> Any:
    """Return the configuration class of a job without importing the job. Raise ValueError if no job has this name."""
    if name not in JOBS:
        raise ValueError(f"unknown job {name!r}{cfg.nearest(name, JOBS)}; jobs: {', '.join(JOBS)}")
    return getattr(settings, f"{name.title()}Config")


def run(job: str, recipe: str | Path | None = None, **settings: Any) -> dict[str, Any]:
    """Run a job and return its result.

    Args:
        job: name of the job, see JOBS.
        recipe: path of a YAML file, or the name of a shipped recipe.
        settings: values that override the recipe, with nested keys (``training={"seed": 1}``) or dotted keys
            (``**{"training.seed": 1}``).

    Raises:
        ValueError: an unknown job, recipe or key, an invalid value or row, an output written with other settings,
            or several processes for a job that supports only one process.
        OSError: a missing file, model or data set, a file that cannot be written, or a full disk.
    """
    return job_of(job)(recipe, **settings)


def parser(jobs: Iterable[str]) -> argparse.ArgumentParser:
    """Return an argparse parser for help texts and shell completion, with the options of `jobs`. The function `split`
    parses the command line instead, because some sections accept keys that only another library defines."""
    form: Any = argparse.RawDescriptionHelpFormatter
    recipes = textwrap.fill(f"a YAML file, or one of: {', '.join(cfg.shipped())}", 100)
    epilog = f"RECIPE is {recipes}\n\n{STATUS}"
    top = argparse.ArgumentParser("raoe-train", usage=USAGE, epilog=epilog, formatter_class=form)
    top.add_argument("--version", action="version", version=f"raoe {version('raoe')}")
    commands = top.add_subparsers(title="jobs", metavar="JOB")
    for name, summary in JOBS.items():
        config = config_of(name)
        positional, count, text = ("RECIPE", "?", recipes) if name != "prepare" else ("NAME", "*", "same as --names")
        usage = f"raoe-train {name} [{positional}] [--config FILE] [--section.key VALUE ...]"
        job = commands.add_parser(name, help=summary, description=summary, usage=usage, formatter_class=form,
                                  epilog=getattr(config, "example", ""))  # fmt: skip
        job.add_argument(positional, nargs=count, help=text)
        job.add_argument("--config", metavar="FILE", help="YAML file of settings; later files override earlier files")
        job.add_argument("--print_config", action="store_true", help="print the settings as a recipe and exit")
        job.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if name in jobs:
            add_keys(job, config)
        if name == "train":
            text = "list all losses, or show the help for the loss CLASS"
            job.add_argument("--loss.help", nargs="?", metavar="CLASS", help=text)
    return top


def add_keys(job: argparse.ArgumentParser, config: Any) -> None:
    """Add a command-line option for each key of a configuration class."""
    essentials = getattr(config, "essentials", ())
    first = job.add_argument_group("settings that most runs need") if essentials else job
    groups: dict[str, Any] = {"": job}
    for name, key in cfg.keys_of(config).items():
        section, of = name.rpartition(".")[0], cfg.dataclass_in(key.type)
        if of in (None, cfg.Choice):
            group = first if name in essentials else groups[section]
            add_key(group, name, key, hidden=bool(group is not job and group.description))
            continue
        # for a section that is unset by default, the help only lists the keys
        inner = ", ".join(cfg.hints_of(of))
        listed = None if key.type is of else textwrap.fill(f"--{name}.KEY VALUE sets {inner}", 100)
        title = key.text or str(of.__doc__).partition(".\n")[0]
        groups[name] = job.add_argument_group(f"{name}: {title}", listed)


def add_key(group: Any, name: str, key: cfg.Key, *, hidden: bool = False) -> None:
    kind, default = cfg.describe(key.type), key.default
    if key.type is cfg.Choice:
        default = default.class_path
    shown = default if isinstance(default, str) and default else json.dumps(default)
    text = f"{key.text} ({kind}; default: {shown})".strip().replace("%", "%%")
    several = "+" if "a list" in kind or "a mapping" in kind else "?" if "true or false" in kind else None
    form = "NAME=VALUE" if "NAME=VALUE" in kind else "VALUE"
    group.add_argument(f"--{name}", nargs=several, metavar=form, help=argparse.SUPPRESS if hidden else text)


def split(words: Sequence[str]) -> tuple[list[str], dict[str, list[list[str]]]]:
    """Split a command line into (words before the first option, {option: [words after each of its occurrences]})."""
    before, options = list[str](), dict[str, list[list[str]]]()
    values = before
    for word in words:
        if word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            options.setdefault(option, []).append(values)
        else:
            values.append(word)
    return before, options


def configure(words: Sequence[str]) -> tuple[str, dict[str, list[list[str]]], Any]:
    """Parse a command line. Return the job's name, the options that are not settings, and the job's configuration. The
    caller must still check the configuration with `checked`."""
    (job, *names), options = split(words)
    config = config_of(job)
    keys, given = cfg.keys_of(config), dict[str, Any]()
    others = {option: options.pop(option) for option in OPTIONS if option in options}
    names += [word for flag in ("print_config", "traceback") for words in others.get(flag, ()) for word in words]
    for option, values in options.items():
        if len(values) > 1:
            raise ValueError(f"--{option} is given twice; list several values after one flag: --{option} A B")
        hint = keys[option].type if option in keys else Any
        if not values[0] and hint is not Any and "boolean" not in cfg.kinds_of(hint):
            raise ValueError(f"--{option} needs a value: {cfg.describe(hint)}")
        given[option] = cfg.value_of(values[0], hint)
    recipes = [file for files in others.get("config", ()) for file in files]
    if job == "prepare" and names:
        if "names" in given:
            raise ValueError("data sets are named both before the options and with --names: use only one of the two")
        given["names"] = names
    elif len(names) > 1:
        raise ValueError(f"only one recipe can precede the options, got {', '.join(names)}")
    else:
        recipes = [*names, *recipes]
    return job, others, cfg.merge(config, [*recipes, given])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. The status is 0 for success, 1 if the job finished with
    failures, 2 for invalid input or a known problem (such as a full disk or a NaN loss), and 3 for an unexpected error.
    The status is 130 after an interruption and 141 after a broken pipe."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a character that terminals cannot show must not end a run
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except BrokenPipeError:  # the program that reads the output has ended, for example `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # the shell's status for SIGPIPE


def _main(words: list[str]) -> int:
    # At import, bitsandbytes warns about a missing optional kernel. Users can ignore this warning.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # the libraries read these variables when they are imported
        for key in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(key, "1")
        for key in ("TQDM_DELAY", "TQDM_MININTERVAL"):  # one progress line per minute
            os.environ.setdefault(key, "60")
    try:
        result = _run(words)
        sys.stdout.flush()
    except SystemExit as end:  # raised by argparse after --help or --version
        sys.stdout.flush()
        return int(end.code or 0)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("raoe-train: interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    except Exception as error:
        if "--traceback" in words:
            raise
        known = _explain(error, words[0])
        print(f"raoe-train: {known or _unexpected(error)}", file=sys.stderr)
        return 2 if known else 3
    return 1 if result.get("failed") else 0


def _run(words: list[str]) -> dict[str, Any]:
    """Run the job of a command line. Return its result, or {} if an option only prints text (--print_config)."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete  # type: ignore[import-not-found]

        argcomplete.autocomplete(parser(JOBS))
    if not words:
        parser([]).print_help()
        raise SystemExit(2)
    if words[0].startswith("-"):
        parser([]).parse_args(words)  # --help or --version
    config_of(words[0])  # raises an error with a hint for an unknown job
    if {"-h", "--help"} & {*words}:
        parser(words[:1]).parse_args([words[0], "--help"])
    job, options, config = configure(words)
    if "loss.help" in options:
        print(loss_help(*options["loss.help"][0][:1]))
    elif "print_config" in options:
        print(cfg.recipe_text(cfg.checked(config)), end="")
    else:
        check_paths(config)
        if finished := finished_result(output_of(config)):
            return finished
        result = job_of(job)(config)
        end_group()
        return result
    return {}


def loss_help(name: str = "") -> str:
    """Return the help text for a loss and its keywords. Without a name, return a line of text that lists all losses."""
    if not name:
        return f"losses in raoe_train.losses: {', '.join(sorted(settings.known_losses()))}"
    loss = settings.loss_class(name)
    usage, text = f"raoe-train train --loss {name} [--loss.KEYWORD VALUE ...]", inspect.getdoc(loss) or ""
    form: Any = argparse.RawDescriptionHelpFormatter
    keywords = argparse.ArgumentParser(usage=usage, add_help=False, formatter_class=form,
                                       description=text.partition("\n\nArgs:")[0])  # fmt: skip
    for each, key in settings.loss_keywords(loss).items():
        add_key(keywords, f"loss.{each}", key)
    return keywords.format_help()


def _unexpected(error: Exception) -> str:
    """Write the traceback of an unexpected error to a temporary file, and return the message for the user."""
    handle, name = tempfile.mkstemp(".txt", "raoe-train-")
    with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message} (unexpected error; the traceback is in {name})"


def _explain(error: Exception, job: str) -> str:
    """Return the message that explains an error to the user, or "" if the error is unexpected. Known problems are
    invalid input, a missing file or package, a full disk, a NaN loss and running out of memory."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        extra = EXTRAS[error.name]
        return f"{error.name} is not installed: install raoe[{extra}] (in a checkout: pip install -e '.[{extra}]')"
    reason, first_line = str(error), str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "out of memory" in reason or "can't allocate memory" in reason:
        sizes = [key for key in cfg.keys_of(config_of(job)) if key.endswith("batch_size")] if job in JOBS else []
        sizes = ["training.per_device_train_batch_size"] if job == "train" else sizes[-1:]
        lower = "".join(f"--{key} with a lower value, or " for key in sizes)
        return f"out of memory: try {lower}a smaller model ({first_line[:200]})"
    if isinstance(error, RuntimeError) and "home directory" in reason:  # raised by Path.expanduser
        return "the home folder is unknown: set HOME, or write paths without ~"
    if isinstance(error, FileNotFoundError) and error.filename is None and error.errno:  # raised by os.getcwd
        return "the working folder no longer exists: change to another folder"
    is_known = isinstance(error, (ValueError, OSError, ImportError, FloatingPointError))
    return reason or type(error).__name__ if is_known else ""
