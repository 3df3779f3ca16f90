"""A hook of mkdocs that builds the site from the repository's pages.

Pages outside docs/ get a place in the site. Links between pages of the repository become links of the site; links to
files without a page, such as tests, become text. Fences of `math` become MathML. Pages of ops end with their functions.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
# page in the repository: page of the site; pages in docs/ keep their places
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "csrc/README.md": "project/csrc.md",
    "tests/third_party/README.md": "project/third-party.md",
    "benchmarks/results/README.md": "measured/results.md",
    **{
        f"raoe_kernels/{path.parent.name}/README.md": f"ops/{path.parent.name}.md"
        for path in ROOT.glob("raoe_kernels/*/README.md")
    },
}
TRAIN = "ops/train.md"  # generated from docstrings
USER_FOLDERS = ("ops", "tutorials")  # search lists their pages, and those outside folders, before measurements
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
INLINE = re.compile(r"\$(\\[^$\n]+)\$")  # such as $\tau$
MATH = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(^```[\s\S]*?^```$|^(?: {4}.*\n)+)", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    for source, place in PLACES.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, TRAIN, content=_train_page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    source = next((of for of, at in PLACES.items() if at == place), f"docs/{place}")
    if "/" in place and not place.startswith(USER_FOLDERS):
        page.meta["search"] = {"boost": 1e-4}  # a word in a title counts 1,000 times as much
    # leave code unchanged
    parts = CODE.split(MATH.sub(lambda match: _formula(match[1]), markdown))
    parts[::2] = [INLINE.sub(lambda match: convert(match[1]), part) for part in parts[::2]]
    parts[::2] = [LINK.sub(lambda match: _link(match, source, place), part) for part in parts[::2]]
    markdown = "".join(parts)
    if place.startswith("ops/") and place != TRAIN:
        markdown += "\n\n## Functions\n" + "".join(f"\n::: raoe_kernels.{name}\n" for name in _functions(source))
    return markdown


def _formula(latex: str) -> str:
    lines = [convert(line.strip(), display="block") for line in latex.strip().split("\\\\\n")]
    return "\n".join(['<div class="math">', *lines, "</div>"])


def _link(match: re.Match[str], source: str, place: str) -> str:
    picture, text, target = match.groups()
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return match[0]
    file = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if (ROOT / file).is_dir():
        file += "/README.md"
    goal = PLACES.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
    if goal is None or goal.endswith((".py", ".jsonl")):
        # a dead link stays a link, which fails the strict build
        return (
            text
            if (ROOT / file).exists() or ((ROOT / file).parent.is_dir() and file.endswith("/README.md"))
            else match[0]
        )
    return f"{picture}[{text}]({posixpath.relpath(goal, posixpath.dirname(place) or '.')}{mark}{anchor})"


def _functions(source: str) -> list[str]:
    """The public functions of an op, in the order of its `__init__`."""
    own, public = _exported((ROOT / source).with_name("__init__.py")), _exported(ROOT / "raoe_kernels" / "__init__.py")
    return [name for name in own if name in public]


def _exported(path: Path) -> list[str]:
    return re.findall(r'"(\w+)"', path.read_text(encoding="utf-8").partition("__all__ = [")[2].partition("]")[0])


def _train_page() -> str:
    """The public names of raoe_train."""
    front = (ROOT / "raoe_train" / "__init__.py").read_text(encoding="utf-8").partition("HOMES")[2]
    homes = re.findall(r'"(\w+)": "([\w.]+)"', front)
    names = [f"{home}.{name}" for name, home in homes if not name.startswith("__")]
    losses = [f"raoe_train.losses.{name}" for name in _exported(ROOT / "raoe_train" / "losses" / "__init__.py")]
    return "\n\n".join(
        [
            "# Losses and trainer",
            "Import them with `import raoe_train as rt`. [Python](../python.md) has an example of each.",
            "## Data, trainer and jobs",
            *(f"::: {name}" for name in names),
            "## Losses",
            "Import a loss from `rt.losses`, or name it in a recipe's section `loss`.",
            *(f"::: {name}" for name in losses),
        ]
    )
