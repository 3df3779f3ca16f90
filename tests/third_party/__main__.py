"""Run sentence-transformers' tests of losses with the classes of raoe in place of theirs:

    python -m tests.third_party PATH_OF_A_CHECKOUT [arguments of pytest]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOSSES = "tests/sentence_transformer/losses"
TESTS = ("gradcache", "cmnrl", "cached_mnsrl", "merged_forward", "gist_embed", "cached_gist_embed")


def main(checkout: Path, *given: str) -> int:
    if not (checkout / LOSSES).is_dir():
        raise SystemExit(f"{checkout} is no checkout of huggingface/sentence-transformers: it has no {LOSSES}")
    # Our stand-ins are a plugin by their own name: their tests are a package `tests`, too. From an empty folder, so
    # that what is tested beside us is what is installed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "TEST_DEVICE": "cpu"}
    words = [sys.executable, "-m", "pytest", "-p", "in_sentence_transformers", "-q", "-rsxXfE"]
    words += ["-p", "no:cacheprovider", "--tb=short", "--rootdir", str(checkout), "-o", "addopts=", *given]
    words += [str(checkout / LOSSES / f"test_{name}.py") for name in TESTS]
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(words, cwd=empty, env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
