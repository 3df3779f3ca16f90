"""Source sentences from every cluster."""

import numpy as np
import pytest

from benchmarks.studies.seeds import draw_from_clusters, main
from tests.tiny import SENTENCES, tiny_encoder


def test_seeds_come_from_every_cluster():
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(5, 16))
    groups = np.repeat(np.arange(5), [50, 40, 30, 20, 12])
    rows = centres[groups] * generator.uniform(1, 9, size=(152, 1)) + 0.01 * generator.normal(size=(152, 16))
    chosen = draw_from_clusters(rows, 5, 4, seed=1)
    assert chosen == sorted(set(chosen))
    assert np.bincount(groups[chosen]).tolist() == [4] * 5  # whatever a vector's length
    assert draw_from_clusters(rows, 5, 4, seed=1) == chosen
    assert draw_from_clusters(rows, 1, 4, seed=2) != draw_from_clusters(rows, 1, 4, seed=1)
    every = draw_from_clusters(rows, 5, 20, seed=1)
    assert np.bincount(groups[every]).tolist() == [20, 20, 20, 20, 12]  # all there are
    with pytest.raises(ValueError, match="n_clusters=153"):
        draw_from_clusters(rows, 153, 1)


def test_the_command_writes_distinct_sentences(tmp_path, capsys):
    tiny_encoder(double=False).save(str(tmp_path / "encoder"))
    (tmp_path / "in.txt").write_text("\n".join([*SENTENCES, "", SENTENCES[0]]))
    options = ["--model", str(tmp_path / "encoder"), "--output", str(tmp_path / "out.txt"), "--per_cluster", "2"]
    main([str(tmp_path / "in.txt"), *options, "--clusters", "2"])
    chosen = (tmp_path / "out.txt").read_text().splitlines()
    assert len(chosen) == len({*chosen} & {*SENTENCES}) == 4
    with pytest.raises(SystemExit, match="only 11 distinct sentences: lower --clusters"):
        main([str(tmp_path / "in.txt"), *options, "--clusters", "12"])
