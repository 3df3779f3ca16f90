"""``python -m tests.mutation [FILE ...] [--all] [--only WORD ...]``: small changes of the code, which its tests notice.

Mutants are those of the rooms of the files given, by default of those changed since main (on main, since the commit
before). The tests run in a copy of the tree. What survives, and is not listed with a reason, ends it with 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import cache
from pathlib import Path

from tests.mutation.mutant import Mutant, room
from tests.mutation.of_kernels import KERNELS
from tests.mutation.of_training import TRAINING

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = [*KERNELS, *TRAINING]
# What tests import of others' is imported once, before the processes that run them part.
SHARED = ("tests.conftest", "pytest", "hypothesis", "sentence_transformers", "datasets", "sklearn.linear_model")
OURS = ("raoe_kernels", "raoe_train", "benchmarks", "tests", "csrc")
# Quick to compile; rounding is another than of what ships, within what the tests allow.
QUICK = {"RAOE_KERNELS_BUILD": "cpu", "CXXFLAGS": "-O1 -DRAOE_SIMD_BASELINE"}


def copied(folder: Path) -> Path:
    """The tree as it is here, with the compiled modules, without what git ignores."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    names = [name for name in listed if name and (ROOT / name).is_file()]
    names += [str(path.relative_to(ROOT)) for path in (ROOT / "raoe_kernels").glob("_native_*.so")]
    for name in [*names, "raoe_kernels/_build_info.json"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def failed(tree: Path, tests: str, seconds: int) -> str | None:
    """The first of these tests (fast ones alone) that fails in the tree, or "" where none can be named: the process
    died or took its seconds. None where all pass."""
    said = tree / "said.txt"
    child = os.fork()
    if child == 0:
        _run(tree, tests, seconds)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return None
    text = said.read_text(encoding="utf-8", errors="replace")
    if code in (4, 5):
        raise SystemExit(f"nothing ran of {tests}\n{text[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    return found[1] if found else ""


def _run(tree: Path, tests: str, seconds: int) -> None:
    """In a process of its own: pytest in the tree, and the end. Time is the processor's: others may be busy, too."""
    said = os.open(tree / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1), os.dup2(said, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    import pytest

    code = 1
    try:
        words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
        code = pytest.main([*words, "--timeout", str(10 * seconds), *shlex.split(tests)])
    finally:
        sys.stdout.flush()
        os._exit(int(code))


def killed_by(tree: Path, mutant: Mutant, seconds: int) -> str | None:
    """As `failed`, of the changed tree, which is then as before."""
    path, modules = tree / mutant.file, list((tree / "raoe_kernels").glob("_native_*.so"))
    text, built = path.read_text(encoding="utf-8"), {module: module.read_bytes() for module in modules}
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        if mutant.file.startswith("csrc/"):
            command, environ = [sys.executable, "csrc/build_modules.py"], {**os.environ, **QUICK}
            made = subprocess.run(command, cwd=tree, env=environ, capture_output=True)
            if made.returncode:
                raise SystemExit(f"{mutant} does not compile\n{made.stderr.decode()[-2000:]}")
        return failed(tree, mutant.tests, seconds)
    finally:
        path.write_text(text, encoding="utf-8")
        for module, content in built.items():
            module.unlink(missing_ok=True)
            module.write_bytes(content)


def changed() -> list[str]:
    """Files that differ from where this branch left main, or on main from the commit before."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    base = git("merge-base", "main", "HEAD")
    return git("diff", "--name-only", "HEAD~1" if base == git("rev-parse", "HEAD") else base).splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="of the rooms of these")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--only", nargs="+", default=[""], help="those of files with such a word in their paths")
    parser.add_argument("--seconds", type=int, default=120, help="of the processor for the tests of one")
    given = parser.parse_args()
    rooms = {room(file) for file in given.files or ([] if given.all else changed())}
    chosen = [
        mutant
        for mutant in MUTANTS
        if (given.all or mutant.room in rooms) and any(word in mutant.file for word in given.only)
    ]
    for name in SHARED:
        importlib.import_module(name)
    sys.dont_write_bytecode = True  # of a file's two versions of one second, Python could take the other's
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "TOKENIZERS_PARALLELISM": "false"}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="raoe_mutants_") as folder:
        tree = copied(Path(folder))

        @cache
        def sound(test: str) -> bool:
            return not test or failed(tree, shlex.quote(test), given.seconds) is None

        for number, mutant in enumerate(chosen, 1):
            began = time.perf_counter()
            test = killed_by(tree, mutant, given.seconds)
            if test is None:
                end = "survived, and may" if mutant.reason else "survived"
            else:
                end = "killed" if sound(test) else "fails without it, too"
            counts[end] += 1
            what = " ".join(f"{mutant.old} -> {mutant.new}".split())
            took = time.perf_counter() - began
            print(f"{number}/{len(chosen)} {end} ({took:.0f} s): {mutant.file}: {what}", flush=True)
            if test:
                print(f"    {test}", flush=True)
    print(", ".join(f"{count} {end}" for end, count in counts.items()) or "no mutant is of these files' rooms")
    return int(any(counts[end] for end in ("survived", "fails without it, too")))


if __name__ == "__main__":
    sys.exit(main())
