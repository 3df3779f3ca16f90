"""The command ``raoe-train JOB [RECIPE] [--section.key VALUE …]``, and its Python function ``run``."""

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
    "check": "check that embeddings do not depend on padding and batch size",
}
TRAIN_PACKAGES = ("accelerate", "datasets", "filelock", "matplotlib", "pandas", "peft", "pyarrow",
        "scipy", "sentence_transformers", "sklearn", "transformers", "tqdm", "yaml")  # fmt: skip
EXTRAS = {**dict.fromkeys(TRAIN_PACKAGES, "train"), "bitsandbytes": "4bit"}  # {import name: extra}
USAGE = "raoe-train JOB [RECIPE] [--config FILE] [--section.key VALUE ...]"
OPTIONS = {"job", "positional", "config", "print_config", "traceback", "loss.help"}  # options that are not settings
STATUS = "exit status: 0 done, 1 finished with failures, 2 invalid input, 3 unexpected error, 130 interrupted"


def job_of(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function of a job. ValueError if no job has this name."""
    config_of(name)
    return getattr(importlib.import_module(f"raoe_train.jobs.{name}"), name)


def config_of(name: str) -> Any:
    """Return the configuration class of a job without importing the job. ValueError if no job has this name."""
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
        ValueError: an unknown job, recipe or key, an invalid value or row, an output made with other settings,
            or several processes for a job that supports only one process.
        OSError: a missing file, model or data set, a file that cannot be written, or a full disk.
    """
    return job_of(job)(recipe, **settings)


class Parser(argparse.ArgumentParser):
    """An argument parser with an option for each key of `config`, a configuration class (None: no such options)."""

    def __init__(self, *args: Any, config: Any = None, **settings: Any) -> None:
        settings |= {"argument_default": argparse.SUPPRESS, "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **settings, allow_abbrev=False)  # type: ignore[misc]
        self.keys = cfg.keys_of(config) if config else {}
        essentials = getattr(config, "essentials", ())
        groups: dict[str, Any] = {"": self}
        first = self.add_argument_group("settings that most runs need") if essentials else self
        for name, key in self.keys.items():
            section, of = name.rpartition(".")[0], cfg.dataclass_in(key.type)
            if of in (None, cfg.Choice):
                self.add_key(name, key, first if name in essentials else groups[section])
            else:  # for a section that is unset by default, the help only lists the keys
                inner = [each.rpartition(".")[2] for each in self.keys if each.startswith(f"{name}.")]
                listed = None if key.type is of else textwrap.fill(f"--{name}.KEY VALUE sets {', '.join(inner)}", 100)
                title = key.text or str(of.__doc__).partition(".\n")[0]
                groups[name] = self.add_argument_group(f"{name}: {title}", listed)

    def add_key(self, name: str, key: cfg.Key, group: Any) -> None:
        """Add the option of a key."""
        default = key.default.class_path if key.type is cfg.Choice else key.default
        shown = default if isinstance(default, str) and default else json.dumps(default)
        kind = cfg.describe(key.type)
        text = f"{key.text} ({kind}; default: {shown})".strip().replace("%", "%%")
        several = "+" if cfg.is_generic(key.type, Iterable) else "?" if bool in cfg.members(key.type) else None
        form = "NAME=VALUE" if "NAME=VALUE" in kind else "VALUE"
        text = argparse.SUPPRESS if group is not self and group.description else text
        group.add_argument(f"--{name}", action="append", nargs=several, metavar=form, help=text)

    def error(self, message: str) -> Any:
        raise ValueError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words. Unknown keys are accepted here: some sections allow any key, and `merge` rejects the others."""
        unknown = (word.partition("=")[0] for word in args or () if self.keys and word.startswith("--"))
        for option in {*unknown} - {*self._option_string_actions, "--"}:
            self.add_argument(option, action="append", nargs="*")
        return super().parse_known_args(args, namespace)


def parser() -> Parser:
    """Return the parser of the command line."""
    recipes = textwrap.fill(f"a YAML file, or one of: {', '.join(cfg.shipped())}", 100)
    top = Parser("raoe-train", usage=USAGE, epilog=f"RECIPE is {recipes}\n\n{STATUS}")
    top.add_argument("--version", action="version", version=f"raoe {version('raoe')}")
    jobs = top.add_subparsers(title="jobs", metavar="JOB", dest="job", parser_class=Parser)
    for name, summary in JOBS.items():
        config = config_of(name)
        positional, count, text = ("NAME", "*", "same as --names") if name == "prepare" else ("RECIPE", "?", recipes)
        usage = f"raoe-train {name} [{positional}] [--config FILE] [--section.key VALUE ...]"
        example = getattr(config, "example", "")
        job = jobs.add_parser(name, help=summary, description=summary, usage=usage, epilog=example, config=config)
        job.add_argument("positional", nargs=count, metavar=positional, help=text)
        job.add_argument("--config", action="append", metavar="FILE", help="YAML file of settings; the last file wins")
        job.add_argument("--print_config", action="store_true", help="only print the settings, as a recipe")
        job.add_argument("--traceback", action="store_true", help="show the traceback of an error")
        if name == "train":
            text = "list all losses, or show the help of the loss CLASS"
            job.add_argument("--loss.help", nargs="?", const="", metavar="CLASS", help=text)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        import argcomplete  # type: ignore[import-not-found]

        argcomplete.autocomplete(top)
    return top


def configure(words: Sequence[str]) -> tuple[dict[str, Any], Any]:
    """Parse a command line. Return the options, and the job's configuration, which `checked` has not checked yet."""
    if words and not words[0].startswith("-"):
        config_of(words[0])  # raises an error with a hint for an unknown job
    options = vars(parser().parse_args(words))
    config = config_of(options["job"])
    keys, given = cfg.keys_of(config), dict[str, Any]()
    for key in options.keys() - OPTIONS:
        if len(options[key]) > 1:
            raise ValueError(f"--{key} is given twice; list several values after one flag: --{key} A B")
        given[key] = cfg.value_of(options[key][0], keys[key].type if key in keys else None)
    recipes, positional = options.get("config", []), options.get("positional")
    if positional and options["job"] == "prepare":
        if "names" in given:
            raise ValueError("data sets are named twice, before the options and with --names: remove one of the two")
        given["names"] = positional
    elif positional:
        recipes = [positional, *recipes]
    return options, cfg.merge(config, [*map(cfg.read_recipe, recipes), given])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 done, 1 finished with failures, 2 invalid input or a known
    problem (a full disk, a NaN loss), 3 unexpected error, 130 interrupted, 141 broken pipe."""
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
        for key in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
            os.environ.setdefault(key, "1")
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
        # known problems: invalid input, a missing file or package, a full disk, a NaN loss, out of memory
        is_known = isinstance(error, (ValueError, OSError, ImportError, FloatingPointError)) or _no_memory(error)
        print(f"raoe-train: {_explain(error, words[0]) if is_known else _unexpected(error)}", file=sys.stderr)
        return 2 if is_known else 3
    return 1 if result.get("failed") else 0


def _run(words: list[str]) -> dict[str, Any]:
    """Run a job and return its result. For options that only print, such as --print_config, print and return {}."""
    if not words:
        parser().print_help()
        raise SystemExit(2)
    options, config = configure(words)
    if "loss.help" in options:
        print(loss_help(options["loss.help"]))
    elif "print_config" in options:
        print(cfg.recipe_text(cfg.checked(config) if getattr(config, "needs_library", False) else config), end="")
    else:
        check_paths(config)
        if finished := finished_result(output_of(config)):
            return finished
        cfg.checked(config)  # reports most errors before the slow import of torch
        result = job_of(options["job"])(config)
        end_group()
        return result
    return {}


def loss_help(name: str) -> str:
    """Return the help text of a loss and its keywords. For the name "", return a list of all losses."""
    if not name:
        return f"losses of raoe_train.losses: {', '.join(sorted(settings.loss_outline()))}"
    loss = settings.loss_class(name)
    usage, text = f"raoe-train train --loss {name} [--loss.KEYWORD VALUE ...]", inspect.getdoc(loss) or ""
    keywords = Parser(usage=usage, add_help=False, description=text.partition("\n\nArgs:")[0])
    for each, key in settings.loss_keywords(loss).items():
        keywords.add_key(f"loss.{each}", key, keywords)
    return keywords.format_help()


def _unexpected(error: Exception) -> str:
    """Write the traceback of an unexpected error to a temporary file, and return the message for the user."""
    handle, name = tempfile.mkstemp(".txt", "raoe-train-")
    with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        traceback.print_exception(error, file=file)
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message} (unexpected error; the traceback is in {name})"


def _explain(error: Exception, job: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        extra = EXTRAS[error.name]
        return f"{error.name} is not installed: install raoe[{extra}] (in a checkout: pip install -e '.[{extra}]')"
    if _no_memory(error):
        reason = str(error).partition("\n")[0][:200]
        sizes = [key for key in cfg.keys_of(config_of(job)) if key.endswith("batch_size")] if job in JOBS else []
        sizes = ["training.per_device_train_batch_size"] if job == "train" else sizes[-1:]
        lower = "".join(f"--{key} with a lower value, or " for key in sizes)
        return f"out of memory: try {lower}a smaller model ({reason})"
    return str(error) or type(error).__name__


def _no_memory(error: Exception) -> bool:
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(each in str(error) for each in words)
