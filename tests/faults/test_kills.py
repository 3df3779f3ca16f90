"""Every job that goes on after a kill, killed a few times. KILLS=20 kills each so often, FAULTS_SEED draws others."""

from __future__ import annotations

import os

import pytest

from tests.faults.kills import disturbed
from tests.faults.small_jobs import make_jobs

KILLS, SEED = int(os.environ.get("KILLS", "3")), int(os.environ.get("FAULTS_SEED", "0"))


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    return make_jobs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * KILLS)
@pytest.mark.parametrize("name", ["train", "score", "generate", "sweep"])
def test_a_job_that_is_killed_ends_like_one_that_is_not(jobs, tmp_path, name):
    tally = disturbed(jobs[name], tmp_path / "outputs", KILLS, SEED)
    assert sum(tally.kills.values()) == KILLS and tally.finished >= 1
    print(f"{name}: {dict(tally.kills)}, {tally.finished} outputs, {dict(tally.places)}")
