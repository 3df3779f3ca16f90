"""Run sentence-transformers' tests with raoe's classes in place of theirs:

    python -m tests.third_party PATH_OF_A_CHECKOUT losses [arguments of pytest]
    python -m tests.third_party PATH_OF_A_CHECKOUT trainer [arguments of pytest]

`trainer` runs the tests with each trainer, and fails if rt.Trainer fails a test that their trainer passes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
LOSSES = ["gradcache", "cmnrl", "cached_mnsrl", "merged_forward", "gist_embed", "cached_gist_embed"]
TRAINER = [
    *(f"base/{name}" for name in ("test_trainer.py", "test_model_card.py", "test_data_collator.py", "samplers")),
    "base/modules/test_router.py",
    *(f"sentence_transformer/test_{name}.py" for name in ("trainer", "training_args", "model_card", "model_card_data")),
]


def run(checkout: Path, plugin: str, files: list[str], given: list[str], **environment: str) -> tuple[int, set[str]]:
    """Run test files. Return (exit status, names of the tests that passed)."""
    # Our plugins have names of their own, because `tests` is also a package of the checkout. Tests run in an empty
    # folder, so that the installed library is tested, not the checkout's.
    paths = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "TEST_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-q", "-rsxXfE", "-p", "no:cacheprovider", "--tb=short"]
    command += [
        "--rootdir",
        str(checkout),
        "-o",
        "addopts=",
        *given,
        *(str(checkout / "tests" / file) for file in files),
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command += ["--junitxml", str(report)]
        status = subprocess.run(command, cwd=folder, env={**os.environ, **paths, **environment}, check=False).returncode
        cases = [*ElementTree.parse(report).iter("testcase")]
    return status, {f"{each.get('classname')}::{each.get('name')}" for each in cases if not len(each)}


def main(checkout: Path, part: str, *given: str) -> int:
    if not (checkout / "tests/sentence_transformer/losses").is_dir():
        raise SystemExit(f"{checkout} is no checkout of huggingface/sentence-transformers")
    if part == "losses":
        files = [f"sentence_transformer/losses/test_{name}.py" for name in LOSSES]
        return run(checkout, "in_sentence_transformers", files, [*given])[0]
    theirs, ours = (run(checkout, "small_models", TRAINER, [*given], RAOE_TRAINER=use)[1] for use in ("", "1"))
    lost = sorted(theirs - ours)
    print(f"passed with sentence-transformers' trainer: {len(theirs)}, with rt.Trainer: {len(ours)}", *lost, sep="\n")
    return int(bool(lost) or not theirs)


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[2] not in ("losses", "trainer"):
        raise SystemExit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
