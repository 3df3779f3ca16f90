"""Others' own tests of losses, with our classes in the place of theirs:

    python -m tests.third_party PATH_OF_A_CHECKOUT [arguments of pytest]

of huggingface/sentence-transformers or allegro/allRank; which it is, is seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# A folder that says which repository it is: (our stand-ins, their tests that concern us).
KNOWN = {
    "tests/sentence_transformer/losses": (
        "in_sentence_transformers",
        [
            f"tests/sentence_transformer/losses/test_{name}.py"
            for name in ("gradcache", "cmnrl", "cached_mnsrl", "merged_forward", "gist_embed", "cached_gist_embed")
        ],
    ),
    "allrank/models/losses": ("in_allrank", ["tests/losses/test_listmle.py"]),
}


def main(checkout: Path, *given: str) -> int:
    found = [both for folder, both in KNOWN.items() if (checkout / folder).is_dir()]
    if len(found) != 1:
        raise SystemExit(f"{checkout} is no checkout of {', '.join(KNOWN)}: those folders say which it is")
    stand_ins, tests = found[0]
    # Our stand-ins are a plugin by their own name: their tests are a package `tests`, too. From an empty folder, so
    # that what is tested beside us is what is installed, where it is.
    paths = [str(HERE), str(HERE.parents[1]), str(checkout), str(checkout / "src")]
    if stand_ins == "in_sentence_transformers":
        paths = paths[:2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TEST_DEVICE": "cpu"}
    environment["TEST_DTYPES"] = "float32,float64"  # their float16 is compared to a relative 1e-5 with itself
    words = [sys.executable, "-m", "pytest", "-p", stand_ins, "-p", "no:cacheprovider", "-q", "-rsxXfE", "--tb=short"]
    words += ["--rootdir", str(checkout), "-o", "addopts=", *given, *(str(checkout / test) for test in tests)]
    with tempfile.TemporaryDirectory() as empty:
        return subprocess.run(words, cwd=empty, env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
