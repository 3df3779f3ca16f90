"""Numbers that stand on pages agree with the recipes, the losses and the result files that they come from.

`python -m tests.packaging.test_docs` writes the generated tables into the pages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from raoe_train import losses, read_pairs
from raoe_train.data.rows import row_table
from raoe_train.jobs.settings import TrainConfig, loss_keywords
from raoe_train.training.training_data import FEW
from tests.pages import PAGES, ROOT

USES = {
    "adapt": "[fine-tune any encoder on your data](adapt.md)",
    "retrieval": "[queries, passages and negatives](tutorials/retrieval.md)",
    "demo": "a first run on the built-in corpus, no downloads",
    "raoe-s1": "[RAOE](reproduce.md), stage 1",
    "raoe-s2": "RAOE, stage 2",
    "raoe-qwen2.5-7b": "RAOE, stage 1",
    "raoe-s2-qwen2.5-7b": "RAOE, stage 2",
    "simcse": "[baseline](reproduce.md)",
    "simcse-qwen2.5-7b": "baseline",
    "sbert-softmax": "baseline",
    "cosent": "baseline",
    "angle": "baseline",
    "bellm": "[a decoder as encoder](bellm.md)",
    "bellm-csts": "[Conditional STS](bellm.md#prompts)",
    "ranking-post": "[post-training on ranking sentences](generation.md#post-train-an-encoder)",
    "margins": "[classes and similarity](margins.md)",
}
RECIPES = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in ROOT.glob("raoe_train/recipes/*.yaml")}
CACHING = ("mini_batch_size", "mini_batch_num_tokens", "gather_across_devices")
COMMON = ("matryoshka_dims", "mask_duplicates", "learn_scale")
SIZES = ("training.num_train_epochs", "training.per_device_train_batch_size")


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def recipe(name: str, key: str) -> Any:
    """A value of a recipe by its dotted key; None if the recipe does not set it."""
    value: Any = RECIPES[name]
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def rate(value: object) -> str:
    """A learning rate as pages write it: 2e-4, 5e-05 as 5e-5."""
    return value if isinstance(value, str) else re.sub(r"\.?0*e-0*", "e-", f"{value:e}")


def values(name: str, *keys: str) -> tuple[object, ...]:
    """Values of a recipe as pages write them."""
    found = [(key, recipe(name, key)) for key in keys]
    return tuple(rate(value) if key.endswith("learning_rate") else value for key, value in found)


def recipes_table() -> str:
    lines = ["| recipe | for | starts from | loss | pooling | epochs | batch | peak learning rate |", "|---" * 8 + "|"]
    for name, use in USES.items():
        loss = recipe(name, "loss.class_path") or recipe(name, "loss")
        arguments = recipe(name, "loss.init_args") or {}
        shown = ", ".join(f"{key} {arguments[key]}" for key in ("scale", "margin") if key in arguments)
        pooling = recipe(name, "model.pooling") or "default"
        if layers := recipe(name, "model.bidirectional_layers"):
            pooling += f", {layers} bidirectional layer{'s' if layers > 1 else ''}"
        cells = (
            f"`{name}`",
            use,
            recipe(name, "model.name") or "your encoder",
            f"`{loss}`" + (f" ({shown})" if shown else ""),
            pooling,
            *values(name, *SIZES, "training.learning_rate"),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def arguments_table() -> str:
    lines = ["| loss | arguments and defaults | common arguments |", "|---|---|---|"]
    for name in losses.__all__:
        loss = getattr(losses, name)
        if name == "AutoLoss" or not (issubclass(loss, losses.Loss) and loss is not losses.Loss):
            continue
        if inspect.isabstract(loss) or not getattr(loss, "reads", None):
            continue
        keywords = {key: each.default for key, each in loss_keywords(loss).items()}
        own = [f"`{key}` {json.dumps(value)}" for key, value in keywords.items() if key not in (*COMMON, *CACHING)]
        common = [f"`{key}`" for key in COMMON if key in keywords]
        if "mini_batch_size" in keywords:
            common.append("caching")
        lines.append(f"| `{name}` | {', '.join(own)} | {', '.join(common)} |")
    return "\n".join(lines)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/commands.md", "recipes"): recipes_table,
    ("docs/losses.md", "arguments"): arguments_table,
}


def marks(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)


@pytest.mark.parametrize(("page", "name"), list(TABLES))
def test_generated_tables_are_up_to_date(page, name):
    match = marks(name).search(text(page))
    assert match, f"{page} has no table {name}"
    assert match[0] == f"{match[1]}\n{TABLES[page, name]()}\n\n{match[2]}", "python -m tests.packaging.test_docs"


def test_the_table_has_every_training_recipe():
    assert set(USES) == set(RECIPES) - {"ranking-sentences"}


# A page, a pattern whose groups are numbers or words, and what they must be. Each pattern must occur at least once.
WORDS = {1: "one", 2: "two", 3: "three"}
LAYERS = WORDS[recipe("bellm", "model.bidirectional_layers")]
CLAIMS: list[tuple[str, str, tuple[object, ...]]] = [
    ("docs/bellm.md", r"\(`model\.pooling: (\w+)`", values("bellm", "model.pooling")),
    ("docs/bellm.md", r"last (\w+) layers attend in both", (LAYERS,)),
    ("docs/bellm.md", r"recipe uses (\w+) bidirectional", (LAYERS,)),
    ("docs/bellm.md", r"the recipe's (\S+), which", values("bellm", "training.learning_rate")),
    ("docs/lab/bellm.md", r"rate (\S+) \(the recipe's\)", values("bellm", "training.learning_rate")),
    ("docs/tutorials/decoder.md", r"last (\w+) layers", (LAYERS,)),
    (
        "docs/reproduce.md",
        r"The recipe uses (\w+)-token pooling and (\w+) bidirectional layers",
        (*values("bellm", "model.pooling"), LAYERS),
    ),
    (
        "docs/reproduce.md",
        r"\| (\d+) epochs, batch (\d+), temperature 1/(\d+)",
        values("bellm", *SIZES, "loss.init_args.scale"),
    ),
    (
        "docs/adapt.md",
        r"(\d+) epochs in batches of (\d+), and at least (\d+) steps",
        values("adapt", *SIZES, "training.min_steps"),
    ),
    ("docs/adapt.md", r"With ([\d,]+) rows or more, `adapt` holds out a tenth of the rows", (f"{FEW:,}",)),
    ("docs/adapt.md", r"may fall by at most (\d+) points", (int(TrainConfig().evaluation.guard_budget),)),
    (
        "docs/losses.md",
        r"recipe `retrieval` trains for (\w+) epochs at a peak learning rate of (\S+), with (\w+) hard negative",
        (
            WORDS[recipe("retrieval", "training.num_train_epochs")],
            *values("retrieval", "training.learning_rate"),
            WORDS[recipe("retrieval", "data.num_negatives")],
        ),
    ),
    (
        "docs/margins.md",
        r"margin ([\d.]+), (\d+) epochs in batches of (\d+), learning rate (\S+)\.",
        values("margins", "loss.init_args.margin", *SIZES, "training.learning_rate"),
    ),
    ("docs/generation.md", r"every (\d+) steps and keeps", values("ranking-post", "training.eval_steps")),
    ("docs/generation.md", r"generates (\d+) sentences per chain", values("ranking-sentences", "generation.steps")),
]


@pytest.mark.parametrize(("page", "pattern", "expected"), CLAIMS)
def test_pages_say_what_the_recipes_say(page, pattern, expected):
    found = [match.groups() for match in re.finditer(pattern, re.sub(r"\s+", " ", text(page)))]
    assert found, f"{page} no longer says this: change the pattern"
    assert {tuple(map(str, expected))} == set(found)


def rates_of_adapt() -> dict[str, str]:
    """The learning rates that `auto` takes, read from the source."""
    source = (ROOT / "raoe_train" / "training" / "arguments.py").read_text(encoding="utf-8")
    [(large, others)] = re.findall(r"rate, reason = (\S+) if size > LARGE else (\S+),", source)
    [adapter], [rows] = (
        re.findall(rf'rate, reason = (\S+), "{each}"', source) for each in ("an adapter", "queries and passages")
    )
    (limit,) = re.findall(r"^LARGE = (\S+)", source, re.MULTILINE)
    return {"adapter": adapter, "rows": rows, "large": large, "others": others, "limit": f"{float(limit) / 1e6:.0f}M"}


def test_pages_say_the_rates_of_adapt():
    rates = rates_of_adapt()
    said = re.sub(r"\s+", " ", text("docs/adapt.md"))
    assert (
        f"The peak learning rate is {rates['others']}; it is {rates['large']} for encoders of more than "
        f"{rates['limit']} parameters, and {rates['rows']} for queries and passages. "
        f"For a LoRA adapter, the peak learning rate is always {rates['adapter']}."
    ) in said


def steps_on_pages() -> list[tuple[str, str]]:
    """Each (page, line) of a table that has times of a GPU step in milliseconds."""
    pages = ("README.md", "docs/by-length.md", "docs/lab/speed.md")
    return [(page, line) for page in pages for line in text(page).splitlines() if re.search(r"\d ms, [\d.]+ GB", line)]


@pytest.mark.parametrize("page", ["pyproject.toml", "CITATION.cff", "mkdocs.yml", "raoe_train/__init__.py"])
def test_one_sentence_says_what_raoe_is(page):
    sentence = text("README.md").split("\n\n")[1].partition(". ")[0]
    assert sentence.startswith("raoe ") and sentence in text(page)


def test_gpu_steps_are_those_of_the_laboratory():
    """README.md and by-length.md repeat cells of lab/speed.md, whose rows are those of the result file."""
    cell = re.compile(r"[\d.]+ ms, [\d.]+ GB")
    rows = [*map(json.loads, text("benchmarks/results/NVIDIA-H200-7864e91.jsonl").splitlines())]
    run = [(1000 * row["median_s"], row["peak_bytes"] / 1e9) for row in rows if row.get("peak_bytes")]
    lab = {each for page, line in steps_on_pages() if page == "docs/lab/speed.md" for each in cell.findall(line)}
    for each in lab:
        numbers = re.findall(r"[\d.]+", each)
        within = [0.51 * 10.0 ** -len(number.partition(".")[2]) for number in numbers]
        assert any(
            all(abs(float(number) - value) <= slack for number, value, slack in zip(numbers, row, within, strict=True))
            for row in run
        ), f"{each} is not in the result file"
    for page, line in steps_on_pages():
        assert set(cell.findall(line)) <= lab, (page, line)


def test_cpu_steps_are_those_of_the_laboratory():
    row = next(line for line in text("docs/lab/speed.md").splitlines() if line.startswith("| SNLI, 512 pairs |"))
    ours, theirs = re.findall(r"[\d.]+ s\b", row)[:2]
    memory = re.findall(r"([\d.]+), ([\d.]+) GB", row)[0]
    for page in ("README.md", "docs/by-length.md"):
        assert f"{ours}, {memory[0]} GB" in text(page) and f"{theirs}, {memory[1]} GB" in text(page), page


def test_sets_that_prepare_writes_have_their_names():
    """`prepare` writes .jsonl.gz. Earlier files were .tsv.gz, so only pages of the laboratory may name these."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        if name.startswith("docs/") and not re.match(r"docs/(lab|results|adapt|margins)/", name):
            assert not re.findall(r"\b(?:nli|stsb|sick|snli|mnli)\.tsv\.gz", text(name)), name


def test_samples_of_data_are_read(tmp_path):
    page = text("docs/data.md")
    page = page[page.index("## Samples") : page.index("## Rows of queries")]
    scored, labelled, classes, rows, texts, lists = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name, sample in (("scored.tsv", scored), ("labelled.tsv", labelled), ("classes.tsv", classes)):
        (tmp_path / name).write_text(sample)
    assert read_pairs(str(tmp_path / "scored.tsv"))["score"][:] == [4.2, 3.6, 0.4]
    assert read_pairs(str(tmp_path / "labelled.tsv"))["label"][:] == [0, 1, 2]
    assert read_pairs(str(tmp_path / "classes.tsv"), columns={"score": "label"})["score"][:] == [1.0, 0.0, 1.0]
    (tmp_path / "rows.jsonl").write_text(rows)
    assert len(row_table(str(tmp_path / "rows.jsonl"))[0]) == 3
    assert [len(line.split("\t")) for line in texts.splitlines()] == [3] * 4
    assert [len(json.loads(line)["sentences"]) for line in lists.splitlines()] == [4] * 3


def test_user_pages_stay_short():
    """README.md and docs/ outside of the laboratory."""
    laboratory = re.compile(r"docs/(lab|results|adapt|margins|benchmarks)/")
    pages = [page for page in PAGES if "raoe_kernels" not in page.parts]
    user = [str(page.relative_to(ROOT)) for page in pages if not laboratory.match(str(page.relative_to(ROOT)))]
    assert len(user) <= 22, user
    assert sum(text(page).count("\n") for page in user) <= 3300  # a ceiling: no sentence is shortened to meet it
    assert text("README.md").count("\n") <= 130


if __name__ == "__main__":
    for (page, name), table in TABLES.items():
        before, head, rest = text(page).partition(f"<!-- {name} -->\n")
        _, tail, after = rest.partition(f"<!-- end of {name} -->")
        (ROOT / page).write_text(f"{before}{head}\n{table()}\n\n{tail}{after}", encoding="utf-8")
        print(page)
