"""Which checkpoint a run resumes from if some are damaged."""

import shutil

import pytest

from raoe_train.training.run_directory import complete_checkpoints, newest_checkpoint


@pytest.fixture
def checkpoints(tmp_path):
    for step in (4, 10, 12):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "optimizer.pt").touch()
        (folder / "trainer_state.json").write_text('{"global_step": 10}')
    (tmp_path / "checkpoint-12" / "trainer_state.json").unlink()  # killed before it was written
    return tmp_path


def test_newest_complete_checkpoint_is_used(checkpoints, capsys):
    shutil.copytree(checkpoints / "checkpoint-10", checkpoints / "checkpoint-10-old")
    assert [path.name for path in complete_checkpoints(checkpoints)] == ["checkpoint-4", "checkpoint-10"]
    assert newest_checkpoint(checkpoints).name == "checkpoint-10"
    assert capsys.readouterr().out == ""
    assert newest_checkpoint(checkpoints / "none") is None


@pytest.mark.parametrize("left", [0, 5])
def test_truncated_state(checkpoints, capsys, left):
    path = checkpoints / "checkpoint-10" / "trainer_state.json"
    path.write_bytes(path.read_bytes()[:left])
    assert newest_checkpoint(checkpoints).name == "checkpoint-4"
    damaged = checkpoints / "checkpoint-10"
    assert capsys.readouterr().out == f"skipping checkpoint {damaged}: its trainer_state.json is damaged\n"


def test_missing_optimizer_state(checkpoints, capsys):
    for step in (4, 10):
        (checkpoints / f"checkpoint-{step}" / "optimizer.pt").unlink()
    assert newest_checkpoint(checkpoints) is None  # starts again, with a message
    assert capsys.readouterr().out.count(": it has no optimizer state") == 2
    assert newest_checkpoint(checkpoints, only_model=True).name == "checkpoint-10"
