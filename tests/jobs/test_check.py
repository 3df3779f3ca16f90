"""The job `check`: what it says of a machine. (Its invariances are tested where they could break.)"""

from __future__ import annotations

import pytest

import raoe_train.jobs.check as check
from raoe_train import run
from tests.tiny import tiny_encoder


@pytest.mark.parametrize("faster", [0.0, 1e9])
def test_what_a_machine_is_fast_at(tmp_path, capsys, monkeypatch, faster):
    monkeypatch.setattr(check, "FASTER", faster)
    tiny_encoder(double=False).save_pretrained(str(tmp_path / "encoder"))
    found = run("check", **{"model.name": str(tmp_path / "encoder"), "model.device": "cpu"})
    *_, pooling, last = capsys.readouterr().out.splitlines()
    assert found["pooling"] == ["mean"] and pooling == "  pooling: mean"
    assert last.startswith("this machine: matrix products in bfloat16 ")
    assert found["machine"]["bfloat16"] > 0
    assert ("training.bf16 true" in found["machine"]["unused"]) == (faster == 0)
