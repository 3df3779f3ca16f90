"""Python processes forked from one that has finished its imports, shared by all tests of a session.

Importing sentence-transformers takes longer than most tests that need a process.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

from torch.multiprocessing import start_processes

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["sentence_transformers", "datasets", "accelerate", "raoe_train.jobs.train", "raoe_train.jobs.score",
     "raoe_train.jobs.evaluate", "raoe_train.jobs.mine",
     "raoe_train.jobs.export", "raoe_train.jobs.encode", "raoe_train.jobs.prepare", "raoe_train.evaluation.transfer",
     "raoe_train.evaluation", "raoe_train.jobs.generate",
     "raoe_train.generation.guided", "raoe_train.encoders.load",
     "raoe_train.losses", "raoe_train.training.report", "raoe_kernels", "matplotlib.pyplot", "scipy.stats"]
)  # fmt: skip


@cache
def context() -> multiprocessing.context.ForkServerContext:
    """A forkserver context with finished imports and one torch thread, in which Triton compiles as for users."""
    kept = dict(os.environ)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        first = _CONTEXT.Process(target=int)
        first.start()
    finally:
        os.environ.clear()
        os.environ.update(kept)
    first.join()
    return _CONTEXT


class Python:
    """`python -m MODULE WORDS` or `python -c CODE WORDS`, running."""

    def __init__(self, *words: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
        self.words = [str(word) for word in words]
        self._folder = tempfile.TemporaryDirectory()
        environment = dict(os.environ if env is None else env)
        self._process = context().Process(target=_be, args=(self.words, str(cwd), environment, self._folder.name))
        self._process.start()

    def running(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self._process.kill()
        self._process.join()

    def end(self, seconds: float = 600) -> subprocess.CompletedProcess[str]:
        """Wait and return as subprocess.run does. After `seconds`, kill the process and raise TimeoutExpired."""
        self._process.join(seconds)
        late = self.running()
        if late:
            self.kill()
        out, error = (Path(self._folder.name, name).read_text(encoding="utf-8") for name in ("1", "2"))
        self._folder.cleanup()
        if late:
            raise subprocess.TimeoutExpired(self.words, seconds, out, error)
        return subprocess.CompletedProcess(self.words, self._process.exitcode or 0, out, error)


def python(*words: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python` with these words and wait."""
    return Python(*words, cwd=cwd, env=env).end()


def together(function: Callable[..., None], processes: int, *arguments: object) -> None:
    """Run function(rank, processes, *arguments) in each process and raise the error of any."""
    context()
    start_processes(function, (processes, *arguments), nprocs=processes, start_method="forkserver")


def _be(words: list[str], cwd: str, environment: dict[str, str], said: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(f"{said}/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    gc.freeze()  # what is imported stays
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    how, what, *more = words
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [how, *more]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), main.__dict__)
