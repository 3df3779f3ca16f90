"""``python -m tests.versions [--only NAME …] [--folder DIR]``: the corners of the versions that pyproject.toml claims,
each in an environment of its own, with the wheel of this tree; docs/lab/versions.md has what came of it.

An environment that is in DIR already is taken as it is, and a corner that has its result there is not run again, so
that the same command goes on. The page is written once DIR has all results. The first run downloads some 4 GB; of CUDA
nothing is installed, see stand_ins.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from benchmarks import provenance
from tests.versions.stand_ins import stand_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "lab" / "versions.md"
SHOWN = ("torch", "numpy", "transformers", "sentence-transformers", "peft", "scikit-learn", "pandas", "datasets")
TOOLS = ("pytest", "pytest-timeout", "setuptools>=77")
TESTS = """
kernels/test_pairwise_by_hand.py kernels/test_cosine.py losses/test_losses.py encoders/test_frozen.py
training/test_trainer.py training/test_checkpoints.py generation/test_chains.py jobs/test_config.py
jobs/test_mining.py jobs/test_scoring.py evaluation/test_tasks.py
""".split()


@dataclass(frozen=True)
class Corner:
    """A Python and a torch version, with the oldest or the newest allowed versions of all other packages."""

    python: str
    torch: str
    oldest: bool = False
    # beside those: versions between, or what the oldest of ours wants itself, where it says so to nobody
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        rest = "oldest" if self.oldest else "between" if self.pins else "newest"
        return f"py{self.python}-torch{self.torch}-{rest}"


CORNERS = (
    Corner("3.10", "2.9.0", oldest=True),
    Corner("3.11", "2.13.0", oldest=True, pins=("pyarrow<26",)),  # 26 cannot be imported with numpy 1
    Corner("3.12", "2.10.0", pins=("transformers==5.20.0", "sentence-transformers==6.1.0", "peft==0.20.0")),
    Corner("3.13", "2.14.1"),
    Corner("3.13", "2.15.0"),
)


def lowest() -> list[str]:
    """NAME==VERSION of the oldest versions that pyproject.toml allows."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    asked = re.search(r"^dependencies = \[(.*?)\]$.*?^train = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert asked
    found = re.findall(r'"([\w-]+)(?:\[\w+\])?>=([\d.]+)', asked[1] + asked[2])
    return [f"{name}=={version}" for name, version in found if name != "torch"]


def interpreter(version: str) -> str | None:
    """A Python of this version, on PATH or from pyenv."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in (*map(str, kept), shutil.which(f"python{version}")):
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    return None


def build(home: Path) -> Path:
    """Build the wheel of this tree for the Python of an environment: it has modules for one CPython only."""
    built = home / "wheel"
    shutil.rmtree(built, ignore_errors=True)
    words = [str(home / "bin" / "python"), "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(built), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True, env={**os.environ, "RAOE_KERNELS_BUILD": "cpu"})
    (wheel,) = built.glob("raoe-*.whl")
    return wheel


def make(corner: Corner, home: Path) -> None:
    """Create the environment of a corner; CalledProcessError if a package cannot be installed."""
    python = interpreter(corner.python)
    if python is None:
        raise FileNotFoundError(f"no Python {corner.python} here")
    subprocess.run([python, "-m", "venv", "--clear", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", f"torch=={corner.torch}"], check=True, capture_output=True)
    (torch,) = home.glob("lib/python*/site-packages/torch")
    (said,) = torch.parent.glob("torch-*.dist-info/METADATA")
    lines = said.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not re.match(r"Requires-Dist: (nvidia|cuda|triton)", line)]
    said.write_text("".join(kept), encoding="utf-8")
    if len(kept) < len(lines):
        stand_in(torch / "lib")
    constraints = home / "constraints.txt"
    constraints.write_text("\n".join([*(lowest() if corner.oldest else []), *corner.pins]), encoding="utf-8")
    wanted = [f"raoe[train] @ {build(home).as_uri()}", *TOOLS]
    subprocess.run([*pip, "-c", str(constraints), *wanted], check=True, capture_output=True)


def tried(corner: Corner, home: Path, folder: Path) -> dict[str, object]:
    """The result of a corner: versions, and the outcome of its tests."""
    python = str(home / "bin" / "python")
    ask = "import importlib.metadata as m, platform; print(platform.python_version(), *map(m.version, {!r}))"
    words = subprocess.run([python, "-c", ask.format(SHOWN)], check=True, capture_output=True, text=True).stdout.split()
    place = home / "tree"  # packages come from the environment
    shutil.rmtree(place, ignore_errors=True)
    for name in ("tests", "benchmarks", "docs", "README.md", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        place.mkdir(exist_ok=True)
        copy(ROOT / name, place / name)
    run = [python, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:randomly"]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [*run, *(f"tests/{name}" for name in TESTS)], cwd=place, env=clean, capture_output=True, text=True
    )
    (folder / f"{corner.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout)}
    bad = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    bad += ["stopped before its end"] if done.returncode not in (0, 1) else []
    ran = f"{date.today()}, {provenance.commit()}"
    return {"versions": dict(zip(("python", *SHOWN), words, strict=True)), "counts": counts, "bad": bad, "ran": ran}


def page(results: dict[str, dict[str, object]]) -> str:
    """The generated part of docs/lab/versions.md."""
    lines = ["| " + " | ".join(["Python", *SHOWN, "tests", "ran"]) + " |", "|---" * (len(SHOWN) + 3) + "|"]
    for name, result in results.items():
        versions, counts = result.get("versions"), result.get("counts")
        if isinstance(versions, dict) and isinstance(counts, dict):
            said = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
            lines.append("| " + " | ".join([*versions.values(), said, str(result["ran"])]) + " |")
        else:
            lines.append(f"| {name}: {result['cannot']} |" + " |" * (len(SHOWN) + 2))
    bad = [f"- {name}: `{test}`" for name, result in results.items() for test in result.get("bad", [])]  # type: ignore
    made = f"Measured with `python -m tests.versions` on {platform.machine()}, without a GPU."
    return "\n".join([made, "", *lines, *(["", *bad] if bad else [])])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help=", ".join(each.name for each in CORNERS))
    parser.add_argument("--folder", type=Path, help="of environments and results [a temporary one]")
    options = parser.parse_args(words)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="raoe-versions-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, object]] = {}
    for corner in CORNERS:
        kept, home = folder / f"{corner.name}.json", folder / corner.name
        if not kept.exists() and (not options.only or corner.name in options.only):
            try:
                if (home / "made").exists():
                    again = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps"]
                    subprocess.run([*again, "--force-reinstall", str(build(home))], check=True, capture_output=True)
                else:
                    make(corner, home)
                    (home / "made").touch()
                result = tried(corner, home, folder)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                said = (getattr(error, "stderr", b"") or str(error).encode()).decode(errors="replace")
                lines = said.strip().splitlines()
                result = {"cannot": next((line for line in lines if line.startswith("ERROR")), lines[-1])[:200]}
            kept.write_text(json.dumps(result), encoding="utf-8")
        if kept.exists():
            results[corner.name] = json.loads(kept.read_text(encoding="utf-8"))
            print(corner.name, {key: results[corner.name][key] for key in results[corner.name] if key != "versions"})
    if len(results) == len(CORNERS):  # otherwise the page would lose the others
        text = PAGE.read_text(encoding="utf-8")
        between = re.compile(r"(?<=<!-- runs -->\n).*?(?=\n<!-- end -->)", re.DOTALL)
        PAGE.write_text(between.sub(lambda _: page(results), text), encoding="utf-8")
    return int(any("cannot" in result or result.get("bad") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
