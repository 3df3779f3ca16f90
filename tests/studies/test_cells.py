"""Cells of studies, and invalid studies."""

import re

import pytest

from benchmarks.studies import jobs
from benchmarks.studies.__main__ import other_keys, parser, sections
from benchmarks.studies.cells import RECIPES, chosen, expand, nest, preparations, read_study
from tests.pages import PAGES, commands

WORDS = {"data_dir": "D", "model": "M", "output": "O"}


def cells_of(tmp_path, scale=None, **changes):
    path = tmp_path / "study.yaml"
    path.write_text("base: raoe-s1\nseeds: [1, 2]\n")
    return expand(read_study(path, changes, scale), WORDS)


def test_expand(tmp_path):
    cells = cells_of(tmp_path, variants={
        "raoe": {},
        "later": {"after": "raoe", "training.num_train_epochs": 3},
        "cosent": {"loss.class_path": "CoSENTLoss", "seeds": [7], "base": "cosent"},
        "rate": {"grid": {"training.learning_rate": [1e-5, "2e-5"], "loss.init_args.margin": [0, 2]}, "seeds": [1]},
    })  # fmt: skip
    by_name = {cell.name: cell for cell in cells}
    assert list(by_name)[:4] == ["raoe-seed1", "raoe-seed2", "later-seed1", "later-seed2"] and len(by_name) == 9
    (cell,) = cells_of(tmp_path, tasks="sick", seeds=3, variants={"a": {}})
    assert (cell.overrides["evaluation"]["tasks"], cell.seed) == (["sick"], 3), "one value for a list"
    assert by_name["cosent-seed7"].recipe == "cosent" and by_name["raoe-seed1"].recipe == "raoe-s1"
    assert by_name["cosent-seed7"].overrides["training"] == {"seed": 7}
    assert by_name["later-seed2"].after is by_name["raoe-seed2"]
    assert by_name["later-seed2"].overrides["training"] == {"num_train_epochs": 3, "seed": 2}
    point = by_name["rate-learning_rate-2e-05-margin-0-seed1"]
    assert point.overrides["training"]["learning_rate"] == 2e-5
    assert point.overrides["loss"] == {"init_args": {"margin": 0}}
    assert point.point == {"training.learning_rate": 2e-5, "loss.init_args.margin": 0}
    names = [cell.name for cell in chosen(cells, ["later-seed2", "cos*"])]
    assert names == ["raoe-seed2", "later-seed2", "cosent-seed7"]
    with pytest.raises(ValueError, match="--only nothing matches no cell; variants: raoe, later, cosent, rate"):
        chosen(cells, ["nothing"])


def test_scale_overrides_every_variant(tmp_path):
    options = {"seeds": [1], "variants": {
        "short": {"data.max_rows": 7, "loss.init_args.margin": 3},
        "curve": {"grid": {"training.num_train_epochs": [4]}},
    }, "scales": {
        "paper": {"settings": {"data.max_rows": None, "training": {"num_train_epochs": 2}}, "tasks": ["sick"]},
        "by pattern": {"variants": {
            "s*": {"loss.init_args.margin": 5, "seeds": [7]}, "curve": {"grid": {"loss.init_args.scale": [4, 5]}},
        }},
        "wrong": {"variants": {"q*": {}}},
        "unknown": {"seeds": [1]},
    }}  # fmt: skip
    short, curve = cells_of(tmp_path, "paper", **options)
    assert short.overrides["data"]["max_rows"] is None and short.overrides["loss"] == {"init_args": {"margin": 3}}
    epochs = [cell.overrides["training"]["num_train_epochs"] for cell in (short, curve)]
    assert epochs == [2, 4], "a grid stays a grid"
    assert short.overrides["evaluation"]["tasks"] == ["sick"]
    short, *curves = cells_of(tmp_path, "by pattern", **options)
    assert (short.overrides["loss"], short.seed) == ({"init_args": {"margin": 5}}, 7)
    assert [c.overrides["training"]["num_train_epochs"] for c in curves] == [4, 4]
    assert [c.overrides["loss"] for c in curves] == [{"init_args": {"scale": scale}} for scale in (4, 5)]
    for scale, message in (("wrong", r"scales\.wrong\.variants\.q\* matches none of"), ("unknown", "not .'seeds'."),
                           ("none", "unknown scale 'none'; this study has paper")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cells_of(tmp_path, scale, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": {}}, "variants is empty"),
        ({"variants": {"a": {"after": "b"}}}, "'a' comes after 'b', which is not among the variants above it: none"),
        ({"variants": {"a": {}, "b": {"after": "a", "seeds": [7]}}}, "'a', which has no single run with seed 7"),
        ({"variants": {"a": {"grid": {"loss.init_args.margin": 2}}}}, r"grid\.loss\.init_args\.margin must be a list"),
        ({"variants": {"../../evil": {}}}, "'../../evil' cannot name a folder"),
        ({"variants": {"a": {}}, "compare": [["a", "b"]]}, "compare takes pairs of variants"),
    ],
)
def test_invalid_studies(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        cells_of(tmp_path, **changes)


def test_needed_preparations(tmp_path):
    """Jobs whose output a cell reads come after the jobs that they need."""
    prepare = {
        "unused": {"job": "train", "recipe": "demo", "output": "{output}/demo"},
        "mined": {"job": "mine", "data.input": "{data_dir}/set.tsv", "output": "{output}/mined.jsonl"},
    }
    variants = {"a": {"data.train": ["{output}/mined.jsonl"]}}

    def needed():
        options = {"variants": variants, "prepare": prepare}
        cells = cells_of(tmp_path, **options)
        return preparations(read_study(tmp_path / "study.yaml", options), WORDS, cells)

    assert needed() == {"mined": ("mine", None, {"data": {"input": "D/set.tsv"}, "output": "O/mined.jsonl"})}
    prepare["mined"]["model.name"] = "{output}/demo"
    assert list(needed()) == ["unused", "mined"]
    prepare["mined"] = {"job": "mine"}
    with pytest.raises(ValueError, match=r"prepare\.mined needs a job and an output"):
        needed()


# cells at the paper's size; the margins paper counts 544 models in its Table 4
AT_PAPER_SIZE = {
    ("bellm-study", "paper"): 5, ("efficiency", "paper"): 5, ("margins", "paper"): 144,
    ("margins", "paper-sizes"): 544, ("ranking-study", "paper"): 19, ("raoe-ablation", "paper"): 51,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_cell_of_a_shipped_study_is_valid(name):
    for scale in (None, *read_study(name)["scales"]):
        asked = read_study(name, None, scale)
        cells = chosen(expand(asked, WORDS), asked["only"])
        assert len({cell.run for cell in cells}) == AT_PAPER_SIZE.get((name, scale), len({cell.run for cell in cells}))
        for cell in cells[:: max(1, len(cells) // 150)]:
            jobs.check("train", cell.recipe, cell.overrides)
        for job, recipe, overrides in preparations(asked, WORDS, cells).values():
            jobs.check(job, recipe, overrides)


def test_the_commands_of_the_pages():
    """A command in a page has a study, a scale and options that exist."""
    result = 0
    for page in PAGES:
        for words in commands(page.read_text(encoding="utf-8")):
            if "benchmarks.studies" not in words:
                continue
            result += 1
            asked, rest = parser().parse_known_args(words[words.index("benchmarks.studies") + 1 :])
            changes = nest(other_keys(rest))
            if asked.command == "sweep":
                assert changes.keys() <= {"settings", "prepare", "scales", "keep_models", "tasks", "variants"}, words
                cells = expand(read_study(asked.study, changes, asked.scale), WORDS)
                assert chosen(cells, asked.only)
            elif asked.command == "pretrain":
                sections(other_keys(rest), "sizes", "training")
            elif asked.command == "models":
                assert not changes, words
            elif asked.command in ("bellm", "csts"):
                assert changes.keys() <= {"model"}, words
            else:
                assert changes.keys() <= {"model"} and all(re.search(r"\.json|/|[A-Z]", path) for path in asked.results)
    assert result > 10
