"""What jobs share: how they are called, and what becomes of their output."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raoe_train.artifacts.disk_errors import explained
from raoe_train.artifacts.processes import owned, rank_and_world
from raoe_train.artifacts.writing import see_writable
from raoe_train.data.files import known_kind
from raoe_train.data.sources import pool
from raoe_train.recipe import arguments, parameters


def job(function: Callable[..., Any] | None = None, *, together: bool = False) -> Any:
    """A job: a function that takes what its recipe may say, from a recipe or from Python alike, and has its output, if
    it has one, to itself.

    Args:
        function: its parameters are declared as raoe_train.recipe says, and arguments are brought to these types.
        together: whether several processes (torchrun's) do it together; others are for one process, else ValueError.
    """
    if function is None:
        return functools.partial(job, together=together)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if not together and rank_and_world()[1] > 1:
            raise ValueError(f"{function.__name__} is for one process: start it without torchrun")
        values = arguments(function, inspect.signature(function).bind_partial(*given, **named).arguments)
        _see_places(function, values)
        output = getattr(values, "output", None)
        alone: Any = contextlib.nullcontext()
        if output and rank_and_world()[0] == 0:
            alone = owned(Path(output), getattr(values, "overwrite", False))
        with explained(output), alone:
            return function(**vars(values))

    return call


def _see_places(of: Any, values: Any, where: str = "") -> None:
    """That what a job, or a section, is told to write can be written, before any work."""
    for name, parameter in parameters(of).items():
        value = getattr(values, name)
        if dataclasses.is_dataclass(value):
            _see_places(type(value), value, f"{where}{name}.")
        elif value and parameter.option.writes:
            see_writable(Path(value).expanduser(), parameter.option.writes, where + name)


def file_to_write(output: str | None, source: str | None, what: str) -> Path:
    """The path of `output`, whose suffix names a format; not that of `source`, the rows to read: `what`, for errors."""
    if not source:
        raise ValueError(f"--data.input is missing: {what}")
    if not output:
        raise ValueError("--output is missing: the file to write")
    path = Path(output).expanduser()
    known_kind(path)
    if path.resolve() in [Path(part.partition("#")[0]).expanduser().resolve() for part in pool(source)]:
        raise ValueError(f"output {path} is the input itself")
    return path


def folder_to_write(output: str | None, overwrite: bool, *models: str) -> Path:
    """The path of the folder `output` for a model: it is not there, or empty, or holds a model that is to be
    overwritten. None of `models`, which the new one is made from, lies in it, nor it in one of them."""
    if not output:
        raise ValueError("--output is missing: the directory to write to")
    folder = Path(output).expanduser()
    theirs = (folder / "modules.json").is_file()
    if folder.is_dir() and any(folder.iterdir()) and not (overwrite and theirs):
        can = "or --overwrite it" if theirs else "as it holds no model that could be overwritten"
        raise ValueError(f"{folder} is not empty; choose another output, {can}")
    for name in models:
        its, ours = Path(name).expanduser().resolve(), folder.resolve()
        if its.is_dir() and (ours in (its, *its.parents) or its in ours.parents):
            raise ValueError(f"output {folder} and {name}, its source, are one folder, or one holds the other")
    return folder
