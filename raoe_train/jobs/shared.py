"""The decorator `job`, which turns functions into jobs, and the settings checks that all jobs share."""

import contextlib
import functools
import json
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raoe_train.config import checked, hints_of, marked, marked_as, merge, to_dict
from raoe_train.inputs import recorded
from raoe_train.outputs import BESIDE, Output, beside, check_writable, different, explained, locked
from raoe_train.processes import on_rank_zero, rank_and_world


def job(function: Callable[..., dict[str, Any]] | None = None, *, together: bool = False) -> Any:
    """Turn a function that takes a configuration object into a job. A running job locks its output.

    A job is called with a recipe (a YAML file, the name of a shipped recipe, or a configuration object) and with
    settings that override the recipe, either nested (``model={"name": "x"}``) or dotted (``**{"model.name": "x"}``).

    If the output is finished and was made with the same settings, the job only returns the recorded result. If the
    output was made with other settings, the job raises ValueError, unless `overwrite` is set.

    Args:
        function: the job. Its parameter `config` is a dataclass. If the dataclass has a field `output`, the job also
            takes an Output, or None if there is nothing to record, and returns the result to record.
        together: whether several processes (under torchrun) can share the job. If False, each of several processes
            raises ValueError. If True, only the first process records the result; all others wait for it.
    """
    if function is None:
        return functools.partial(job, together=together)
    work, config_class = function, typing.get_type_hints(function)["config"]

    def call(recipe: Any = None, /, **settings: Any) -> dict[str, Any]:
        if isinstance(recipe, config_class):
            config = merge(recipe, [settings]) if settings else recipe
        else:
            config = merge(config_class, [recipe, settings])
        rank, world = rank_and_world()
        if not together and world > 1:
            raise ValueError(f"{work.__name__} runs in one process: start it without torchrun")
        check_paths(config)
        # On a CPU, torch compiles a kernel for each matrix product shape. Each of two caches keeps up to 1,024 kernels.
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, "64")  # torch reads these variables at the first matrix product
        path = getattr(config, "output", None)
        lock: Any = locked(path) if path and rank == 0 else contextlib.nullcontext()
        with explained(path), lock:
            if not hasattr(config, "output"):
                return work(checked(config))
            output = output_of(config)
            if finished := finished_result(output):
                return finished
            result = work(checked(config), output)
            if output is None:
                return result
            recorded_result = output.finish(result) if rank == 0 else output.wait()
            return result if output.result else recorded_result

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):  # but not the signature of `work`
        setattr(call, name, getattr(work, name))
    call.config = config_class  # type: ignore[attr-defined]
    return call


def output_of(config: Any) -> Output | None:
    """Return the Output for a job's configuration, with the settings to record, or None if the job writes no record."""
    if not hasattr(config, "output") or not getattr(config, "has_record", True):
        return None
    settings = recorded(config)  # first, because it reports missing files
    if not config.output or getattr(config, "dry_run", False):
        return None
    hint, result = hints_of(type(config))["output"], getattr(config, "result", "")
    kind = {"folder": marked_as(hint, "written folder"), "own_record": marked_as(hint, "record")}
    return Output(config.output, settings, config.overwrite, result=result, **kind)


def finished_result(output: Output | None) -> dict[str, Any] | None:
    """Return the result if the output is finished and has the same settings, else None. If the output cannot be used,
    rank 0 raises an error with the reason, and all other processes raise SystemExit."""
    try:
        return None if output is None else output.finished(say=True)
    except ValueError:
        if rank_and_world()[0] > 0:
            raise SystemExit(2) from None
        raise


def check_nodes(output: Output) -> None:
    """Raise ValueError in a process whose settings or inputs differ from those of rank 0, or that has no access to the
    output of rank 0. Call this function after torch's process group and the output's record have been created."""
    rank, settings = rank_and_world()[0], on_rank_zero(lambda: output.settings)
    if changed := different(settings, output.settings):
        advice = "all nodes need the same files and settings"
        raise ValueError(f"rank {rank} differs from rank 0 in {', '.join(changed)}: {advice}")
    if not output.record.exists():
        raise ValueError(f"rank {rank} cannot find {output.path}: all nodes need a shared file system")


def check_paths(config: Any) -> None:
    """Raise ValueError if an output path is not writable, is an input, lies inside an input model's folder, or
    contains an input. Also raise ValueError if a path or another setting is not valid UTF-8, because Python reads
    invalid bytes as surrogates, which libraries cannot write."""
    folders, files = dict(marked(config, "written folder")), dict(marked(config, "written file"))
    for key in folders.keys() - {"output"}:
        check_writable(Path(folders[key]).expanduser(), key)
    targets = {key: Path(value).expanduser().resolve() for key, value in {**folders, **files}.items()}
    texts = [json.dumps(to_dict(config), ensure_ascii=False, default=str, skipkeys=True), *map(str, targets.values())]
    if lost := re.search(r'[^"\n]*[\ud800-\udfff][^"\n]*', "\n".join(texts)):
        advice = "rename it or, if this locale (LANG) is not UTF-8, set PYTHONUTF8=1"
        raise ValueError(f"{lost.group()!a} is not UTF-8: {advice}")
    for key, source in marked(config, "read"):
        for part in {source, *source.split("+")}:
            path = Path(part.partition("#")[0]).expanduser()
            if not part or not os.path.exists(path):  # Path.exists raises an error for very long names
                continue
            path = path.resolve()
            for name, target in targets.items():
                written = [target, *(beside(target, suffix) for suffix in BESIDE if name in files)]
                if path in written:
                    raise ValueError(f"{name} {target} would overwrite the input {key} {part}: choose another {name}")
                if name == "output" and target in path.parents:
                    raise ValueError(f"output {target} contains the input {key} {part}: choose another output")
                if name == "output" and path in target.parents and (path / "modules.json").is_file():
                    inside = f"lies inside the model folder {part} ({key})"
                    raise ValueError(f"output {target} {inside}: choose another output")


def require(value: str | None, key: str, meaning: str) -> str:
    """Return the value of a required setting. Raise ValueError if the value is missing."""
    if not value:
        raise ValueError(f"--{key} is missing: set it to {meaning}")
    return value
