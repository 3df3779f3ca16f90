"""The job `check`: what a recipe leaves unused of a machine. (Its invariances are tested where they could break.)"""

from __future__ import annotations

import pytest

from raoe_train import run
from tests.tiny import tiny_encoder


@pytest.mark.parametrize("wasteful", [True, False])
def test_what_a_recipe_leaves_unused(tmp_path, capsys, wasteful):
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "encoder"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"training: {{by_length: {str(not wasteful).lower()}, bf16: true}}")
    found = run("check", **{"model.name": str(tmp_path / "encoder"), "model.device": "cpu", "train": str(recipe)})
    assert found["machine"]["bfloat16"] > 0 and "training.bf16 true" not in found["machine"]["unused"]
    assert ("training.by_length true" in found["machine"]["unused"]) == wasteful
    *_, pooling, last = capsys.readouterr().out.splitlines()
    assert found["pooling"] == ["mean"] and pooling == "  pooling: mean"
    assert last.startswith("this machine: matrix products in bfloat16 ")
    assert ("unused: training.by_length true" in last) == wasteful
