"""A finished run that tests look at."""

import pytest

from raoe_train import run
from tests.training.small_runs import settings


@pytest.fixture(scope="package")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    options = settings(folder, **{"evaluation.tasks": [str(folder / "dev.tsv")], "model.prompt": "query: {text}"})
    return folder, options, run("train", "raoe-s1", **options)
