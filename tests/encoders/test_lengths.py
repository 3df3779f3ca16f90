"""Texts by length: runs hold every text, their cuts are the cheapest, and embeddings are unchanged."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel

from raoe_train.encoders import lengths as planning
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.lengths import Grouping, by_length, cut
from raoe_train.losses import ByLength, CoSENTLoss
from tests.tiny import SENTENCES, encoder_of, tiny_encoder


def whole(column: dict[str, Any], row: int) -> list[int]:
    return column["input_ids"][row][column["attention_mask"][row].bool()].tolist()


def test_columns_of_several_kinds_have_runs_of_their_own():
    ids = torch.tensor([[5, 6], [7, 0], [5, 6]])
    tasks = ("query", "document", "query")
    columns = [{"input_ids": ids + n, "attention_mask": (ids > 0).long(), "task": task} for n, task in enumerate(tasks)]
    runs = by_length(columns, Grouping())
    texts = [(run["task"], whole(run, row)) for run in runs.features for row in range(len(run["input_ids"]))]
    for column, rows in zip(columns, runs.rows, strict=True):
        assert [texts[row] for row in rows] == [(column["task"], whole(column, row)) for row in range(3)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("most", [None, 40])
def test_runs_hold_every_text(side, multiple, most, monkeypatch):
    monkeypatch.setattr(planning, "CPU_FORWARD", 20)
    generator = np.random.default_rng(0)
    columns = []
    for width in (40, 23, 31):
        lengths = generator.integers(1, width + 1, 50)
        place = np.arange(width)
        mask = place < lengths[:, None] if side == "right" else place >= width - lengths[:, None]
        ids = generator.integers(1, 4, (50, width)) * mask
        columns.append({"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask).long()})
    runs = by_length(columns, Grouping(most, multiple=multiple))
    assert runs is not None
    texts = [whole(run, row) for run in runs.features for row in range(len(run["input_ids"]))]
    for column, rows in zip(columns, runs.rows, strict=True):
        assert [texts[place] for place in rows.tolist()] == [whole(column, row) for row in range(50)]
    shapes = [run["input_ids"].shape for run in runs.features]
    assert all(
        width % multiple == 0 and (most is None or width * height <= max(most, width)) for height, width in shapes
    )
    copies = sum(len({tuple(whole(column, row)) for column in columns}) for row in range(50))
    assert len(set(map(tuple, texts))) < copies <= 150 and len(texts) <= copies


def test_the_cut_is_the_cheapest():
    """Compared with every possible cut."""
    generator = np.random.default_rng(1)
    for forward in (0, 3, 10, 1000):
        lengths = np.sort(generator.integers(1, 12, 10))

        def cost(edges: Any, lengths: Any = lengths, forward: int = forward) -> int:
            return sum((end - begin) * lengths[end - 1] + forward for begin, end in pairwise(edges))

        result = cut(lengths, forward)
        edges = [0, *(end for _, end in result)]
        assert [begin for begin, _ in result] == edges[:-1] and edges[-1] == 10
        ways = ([0, *(at for at in range(1, 10) if mask >> at & 1), 10] for mask in range(0, 1 << 10, 2))
        assert cost(edges) == min(cost(way) for way in ways)


def test_two_views_of_a_text_are_kept(monkeypatch):
    """SimCSE's positive is its anchor under other dropout. An anchor that two rows share is encoded once."""
    model = tiny_encoder(dropout=0.5)
    features = [model.preprocess(["dogs run", "a train", "dogs run"]) for _ in range(2)]
    monkeypatch.setattr(planning, "CPU_FORWARD", 1)
    runs = by_length(features, Grouping())
    assert runs is not None and len(runs.features) == 2
    assert sum(len(run["input_ids"]) for run in runs.features) == 4
    first, second = (rows.tolist() for rows in runs.rows)
    assert first[0] == first[2] and second[0] == second[2] and not set(first) & set(second)


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_encoding_by_length_gives_equal_embeddings(monkeypatch, batch_size):
    monkeypatch.setattr(planning, "CPU_FORWARD", 1)
    model = tiny_encoder().eval()
    alone = np.concatenate([model.encode([text]) for text in SENTENCES])
    shapes: list[tuple[int, int]] = []
    model[0].register_forward_pre_hook(lambda module, given: shapes.append(tuple(given[0]["input_ids"].shape)))
    np.testing.assert_allclose(
        encode_sentences(model, [*SENTENCES, SENTENCES[0]], batch_size), [*alone, alone[0]], atol=1e-6
    )
    longest = max(width for _, width in shapes)
    assert sum(height for height, _ in shapes) == len(SENTENCES)
    assert len(shapes) >= 3 and all(height * width <= batch_size * longest for height, width in shapes)
    assert "forward" not in vars(model)


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 40}
POSITIONS = {  # learned, relative and rotary ones; counted from the front, or from behind the padding's id
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2},
    "bert": SMALL,
    "electra": {**SMALL, "embedding_size": 16},
    "roberta": {**SMALL, "pad_token_id": 1},
    "mpnet": {**SMALL, "pad_token_id": 1},
    "llama": {**SMALL, "pad_token_id": 0},
}
COUNT_LEADING_PADDING = ("gpt2", "bert", "electra")


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("architecture", POSITIONS)
def test_positions_equal_those_in_padded_batches(architecture, side, monkeypatch):
    """Columns of different widths, with empty, single-token, equal and longest texts. Positions that count leading
    padding differ."""
    monkeypatch.setattr(planning, "CPU_FORWARD", 1)
    config = AutoConfig.for_model(architecture, vocab_size=50, hidden_size=16, **POSITIONS[architecture])
    torch.manual_seed(0)
    model = AutoModel.from_config(config).double().eval()
    draw, pad = random.Random(0), config.pad_token_id or 0

    def embedded(batch):
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        return (states * mask).sum(1) / mask.sum(1).clamp(min=1)

    for _ in range(6):
        texts = [[[draw.randrange(5, 50) for _ in range(draw.choice([0, 1, 2, 3, 7, 12]))] for _ in range(4)]
                 for _ in range(2)]  # fmt: skip
        texts[1][0] = texts[0][0]
        columns = []
        for column in texts:
            width = max(1, *map(len, column)) + draw.choice([0, 3])
            ids, mask = torch.full((4, width), pad), torch.zeros(4, width, dtype=torch.long)
            for row, text in enumerate(column):
                place = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
                ids[row, place], mask[row, place] = torch.tensor(text).long(), 1
            columns.append({"input_ids": ids, "attention_mask": mask})
        runs = by_length(columns, Grouping())
        table = torch.cat([embedded(run) for run in runs.features])
        differences = list[float]()
        for column, rows in zip(columns, runs.rows, strict=True):
            real = column["attention_mask"].any(dim=1)  # rotary positions are float32's
            differences += (table[rows][real] - embedded(column)[real]).abs().flatten().tolist()
        assert (max(differences) > 0.01) == (side == "left" and architecture in COUNT_LEADING_PADDING)
        assert max(differences) > 0.01 or max(differences) <= 2e-7


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "llama"])
def test_models_whose_positions_count_leading_padding_are_refused(kind, side):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = encoder_of(kind, sizes)
    model.tokenizer.padding_side = side
    if side == "left" and kind in COUNT_LEADING_PADDING:
        with pytest.raises(ValueError, match="padding changes the embedding of a text by"):
            ByLength(CoSENTLoss(model))
        alone, padded = (encode_sentences(model, texts)[0] for texts in (["a"], ["a", SENTENCES[-1]]))
        np.testing.assert_allclose(padded, alone, atol=1e-6)  # `encode` reads each text without padding
    else:
        ByLength(CoSENTLoss(model))
