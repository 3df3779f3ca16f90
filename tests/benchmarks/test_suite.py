"""The benchmark suite itself, on trivial contenders. No test checks a time."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks import chains, equal_lengths, forms, gate, generation, gpu, ledger, report, train_step, trainer
from benchmarks.case import Case
from raoe_train.encoders import packed

TESTS = {"passes": "def test_it():\n    assert True\n", "fails": "def test_it():\n    assert False\n"}


@pytest.fixture
def case():
    return Case(
        "3 pairs",
        {"ours": lambda i: torch.ones(3), "theirs": lambda i: torch.ones(3).sum()},
        bytes=12,
        missing={"absent": "No module named 'absent'"},
    )


def test_no_ratio_without_passing_tests(case):
    rows = suite.measure(case, "cpu")
    for row in rows[:2]:  # a time can be 1.00 us
        row |= dict.fromkeys(("median_s", "min_s", "device_s"), 2e-6)
    shown, hidden = suite.table(case, rows, tested=True), suite.table(case, rows, tested=False)
    assert "x ours" in shown and "1.00" in shown
    assert "no ratios" in hidden and "x ours" not in hidden and "1.00" not in hidden
    for text in (shown, hidden):
        assert "theirs" in text and "absent" in text and "missing: No module named 'absent'" in text


def test_page_names_the_backend_of_each_call_on_cuda():
    assert forms.table() in forms.PAGE.read_text(encoding="utf-8")


def test_the_gate(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in TESTS.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    assert not gate.passes("op", [str(tmp_path / "test_fails.py")], "cpu")
    assert "assert False" in capsys.readouterr().out
    assert not gate.passes("op", [str(tmp_path / "test_fails.py")], "cpu"), "a failure is not remembered as a pass"
    assert gate.passes("op", [str(tmp_path / "test_passes.py")], "cpu")
    # Remembered for these sources and this op alone.
    assert gate.passes("op", [str(tmp_path / "test_fails.py")], "cpu")
    assert not gate.passes("other", [str(tmp_path / "test_fails.py")], "cpu")
    monkeypatch.setattr(gate, "state", lambda: "other sources")
    assert not gate.passes("op", [str(tmp_path / "test_fails.py")], "cpu")


def test_failing_peer_does_not_hide_others(case, capsys):
    def raising(error):
        def call(i):
            raise error

        return call

    full = torch.OutOfMemoryError("CUDA out of memory.\nMuch more")
    peers = {"full": full, "absent": ImportError("No module named 'x'"), "broken": ValueError("is wrong")}
    whole = replace(case, contenders=case.contenders | {name: raising(error) for name, error in peers.items()})
    for once in (False, True):
        rows = {row["contender"]: row for row in suite.measure(replace(whole, once=once, missing={}), "cpu")}
        assert list(rows) == ["ours", "theirs", "full", "absent", "broken"] and rows["theirs"]["median_s"] > 0
        assert rows["full"]["missing"] == "OutOfMemoryError: CUDA out of memory."
        assert rows["absent"]["missing"] == "ImportError: No module named 'x'"
        assert [name for name, row in rows.items() if row.get("failed")] == ["broken"]
    assert "ValueError: is wrong" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is wrong"):  # an error of our own raises
        suite.measure(replace(case, contenders={**case.contenders, "ours": raising(peers["broken"])}), "cpu")


@pytest.mark.parametrize("op", suite.OPS)
def test_every_op_declares_its_inputs_once(op, monkeypatch):
    module = suite.declared(op)
    monkeypatch.setitem(generation.SHAPE, "cpu", (128, 2, 4, 2, 256))
    for each in (generation, chains):  # the tokens are compared, whatever the size
        monkeypatch.setattr(each, "VOCABULARY", 4000)
    monkeypatch.setitem(train_step.BASE, "num_hidden_layers", 1)
    monkeypatch.setattr(equal_lengths, "find_spec", lambda name: None)  # MiniLM's shape, made small
    for key, small in {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }.items():
        monkeypatch.setitem(equal_lengths.MINILM, key, small)
    monkeypatch.setattr(train_step, "SOURCES", {"SNLI": train_step.SOURCES["SNLI"]})
    monkeypatch.setitem(trainer.STEPS, "cpu", 2)
    assert set(module.SIZES) == {"cpu", "cuda"} and module.TESTS
    for case in suite.cases(module, min(module.SIZES["cpu"]), "cpu"):
        first = next(iter(case.contenders))
        assert case.bytes > 0 and str(min(module.SIZES["cpu"])) in case.title.replace(",", "")
        assert not any(first in why for why in case.missing)
        for i in range(2):
            case.contenders[first](i)


def test_contenders_of_a_gpu_train_alike(monkeypatch):
    """The loss of a step is the same in float32, whichever way the texts are read."""
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    model, losses = train_step.encoder("cpu", shape), {}
    (columns, score) = train_step.batch([lengths.clip(2) for lengths in train_step.drawn("SNLI", 9)])
    monkeypatch.setattr(train_step, "flash", packed._attention)
    for way in train_step.WAYS:
        if "compiled" in way:
            continue
        loss, inputs, attention = train_step.plan(model, way, columns, score)
        model[0].model.config._attn_implementation = attention
        inputs = (inputs, score) if isinstance(inputs, list) else (inputs,)
        losses[way] = loss(*inputs).item()
    assert len(losses) == 4 and all(value == pytest.approx(losses["packed"], rel=1e-5) for value in losses.values())


def test_report(case, tmp_path):
    lines = tmp_path / "rows.jsonl"
    about = {"op": "pairwise", "device": "cpu", "commit": "abc", "cpu": "a CPU", "tested": True}
    with lines.open("w") as file:
        for size in (3, 30):
            for row in suite.measure(case, "cpu"):
                file.write(json.dumps({"size": size, **about, **row}) + "\n")
    page = report.write([lines], tmp_path / "out").read_text()
    assert "commit abc" in page and "| 3 pairs |" in page and "missing: No module named 'absent'" in page
    assert (tmp_path / "out" / "pairwise-0.png").stat().st_size > 1000
    lines.write_text("{}\nnonsense\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not a line of benchmark JSON"):
        report.write([lines], tmp_path / "out")


def test_committed_ledger_is_up_to_date():
    assert (ledger.RESULTS / "README.md").read_text() == ledger.page(gpu.LEDGER)
