"""Pairs of earlier steps: the loss is that of the batch and the memory together, and the gradient the batch's."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sentence_transformers import util
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

from raoe_kernels import cosent_loss, gated_angular_loss, pairwise_cosine, rank_margin_loss, raoe_loss
from raoe_train.losses import AnglELoss, ByLength, CoSENTLoss, GatedAngularLoss, RankMarginLoss, RAOELoss
from raoe_train.losses.pair_losses import PairLoss
from raoe_train.losses.pair_memory import PairMemory
from raoe_train.losses.registry import loss_settings, make_loss
from tests.forked import together
from tests.tiny import SENTENCES, gradients, tiny_encoder, total

LOSSES: list[Any] = [
    (RAOELoss, lambda c, s, l: raoe_loss(c, s, l, margin=2, scale=3.0)),
    (RankMarginLoss, lambda c, s, l: rank_margin_loss(c, s, margin=2, scale=3.0)),
    (GatedAngularLoss, lambda c, s, l: gated_angular_loss(c, s, l, scale=3.0)),
    (CoSENTLoss, lambda c, s, l: cosent_loss(c, s, scale=3.0)),
    (AnglELoss, lambda c, s, l: cosent_loss(c, s, scale=3.0)),
]


def columns(rows, seed):
    """Two columns of embeddings, and labels; scores have equals, within a batch and across."""
    seeded = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(rows, 6, generator=seeded).requires_grad_() for _ in range(2))
    score = torch.randint(0, 9, (rows,), generator=seeded) / 10
    return [a, b], {"score": score, "label": torch.randint(0, 3, (rows,), generator=seeded)}


@pytest.mark.parametrize("age", [None, 1, 3])
@pytest.mark.parametrize("size", [1, 7, 12, 100])
def test_the_last_pairs_are_there_and_no_others(size, age):
    """Against a list of all there ever was, by batches of different sizes."""
    memory, rng, history = PairMemory(size, age), random.Random(size), []
    shapes = [buffer.shape for buffer in memory.buffers()]
    for step in range(12):
        rows = rng.choice([1, 2, 5, 9])
        fresh = torch.rand(rows), torch.rand(rows), torch.randint(0, 3, (rows,))
        kept = [pair for came, pair in history if age is None or step - came <= age][-size:]
        found = memory(*fresh)
        assert torch.stack([x[:rows].double() for x in found]).equal(torch.stack([x.double() for x in fresh]))
        assert [tuple(pair) for pair in torch.stack([x[rows:].double() for x in found], 1).tolist()] == kept
        history += [(step, tuple(pair)) for pair in torch.stack([x.double() for x in fresh], 1).tolist()]
        assert [buffer.shape for buffer in memory.buffers()] == shapes


def test_twelve_bytes_a_pair():
    assert sum(buffer.nbytes for buffer in PairMemory(1000).buffers()) == 12_000


@pytest.mark.parametrize(("made", "of_pairs"), LOSSES)
def test_a_loss_is_the_kernels_of_batch_and_memory(made, of_pairs):
    loss = made(None, 3.0, memory_size=20, memory_age=3)
    angles = util.pairwise_angle_sim if made is AnglELoss else pairwise_cosine
    earlier: list[tuple[torch.Tensor, ...]] = []
    for step, rows in enumerate((9, 8, 8, 8, 5)):
        embeddings, labels = columns(rows, step)
        found = total(loss.compute_loss_from_embeddings(embeddings, labels))
        similarity = angles(*embeddings)
        own = (similarity.detach().requires_grad_(), labels["score"], labels["label"])
        kept = [torch.cat([new[:0], *(pair[k] for pair in earlier[-3:])])[-20:] for k, new in enumerate(own)]
        together = [torch.cat([new, old]) for new, old in zip(own, kept, strict=True)]
        assert len(together[0]) == rows + (0, 9, 17, 20, 20)[step]
        expected = of_pairs(*together)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        (wanted,) = torch.autograd.grad(expected, own[0])
        assert wanted.abs().max() > 1e-4
        theirs = torch.autograd.grad(similarity, embeddings, wanted, retain_graph=True)
        ours = torch.autograd.grad(found, embeddings)
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
        earlier.append(tuple(x.detach() for x in own))


def batches(model, count=4, rows=9):
    rng = random.Random(5)
    for step in range(count):
        texts = [[rng.choice(SENTENCES) for _ in range(rows)] for _ in range(2)]
        yield [model.preprocess(column) for column in texts], columns(rows, step)[1]


def trained(model, initial, loss, of=lambda batch: batch):
    """The losses and all parameters after some steps of SGD."""
    model.load_state_dict(initial)
    optimiser, values = torch.optim.SGD(model.parameters(), lr=0.05), []
    for features, labels in batches(model):
        optimiser.zero_grad()
        value = total(loss(*of((copy.deepcopy(features), labels))))
        value.backward()
        optimiser.step()
        values.append(value.detach())
    return torch.stack(values), torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("made", [RAOELoss, CoSENTLoss])
def test_cached_and_by_length(made):
    model = tiny_encoder()
    initial = copy.deepcopy(model.state_dict())
    expected = trained(model, initial, made(model, memory_size=15))
    alone = trained(model, initial, made(model))
    assert torch.equal(alone[0][0], expected[0][0]) and (alone[0][1:] - expected[0][1:]).abs().min() > 1e-2
    for settings in ({}, {"mini_batch_size": 2}, {"mini_batch_num_tokens": 40}):
        for wrap in (ByLength, lambda loss: loss):
            found = trained(model, initial, wrap(made(model, memory_size=15, **settings)))
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("by_length", [False, True])
def test_evaluation_neither_reads_nor_writes(by_length):
    model = tiny_encoder()
    loss: Any = RAOELoss(model, memory_size=15, mini_batch_size=4)
    ours, plain = loss, RAOELoss(model)
    loss = ByLength(loss) if by_length else loss
    (features, labels), *_ = batches(model)
    total(loss(copy.deepcopy(features), labels))
    state = copy.deepcopy(ours.memory.state_dict())
    assert ours.memory.held == 9

    def evaluated():
        found = total(loss(copy.deepcopy(features), labels))
        torch.testing.assert_close(found, total(plain(copy.deepcopy(features), labels)))
        for key, value in ours.memory.state_dict().items():
            assert value == state[key] if isinstance(value, list) else value.equal(state[key])

    with torch.no_grad():
        evaluated()
    model.eval()
    evaluated()
    model.train()
    loss.eval()
    evaluated()
    loss.train()
    assert not torch.isclose(total(loss(features, labels)), total(plain(features, labels)))


def test_another_scale_remembers_nothing():
    """What calibration tries, and what a trainer makes of a loss for each of its datasets."""
    loss = RAOELoss(None, memory_size=9, memory_age=4)
    loss.compute_loss_from_embeddings(*columns(5, 0))
    other = loss.with_scale(3.0)
    assert (other.memory_size, other.memory_age, other.memory.held, loss.memory.held) == (9, 4, 0, 5)


def test_recipes_and_what_cannot_be():
    chosen = loss_settings({"name": "cosent", "memory_size": "512", "memory_age": "8"})
    assert make_loss(chosen).memory.similarity.shape == (512,) and make_loss(chosen).memory.age == 8
    assert make_loss(loss_settings({})).memory is None  # off unless asked for
    for settings, message in [
        ({"memory_size": -1}, "memory_size must be a whole number of pairs from 0, got -1"),
        ({"memory_size": 2.5}, "memory_size must be a whole number of pairs from 0, got 2.5"),
        ({"memory_size": 4, "memory_age": 0}, "memory_age must be a whole number of steps from 1, or None, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            RAOELoss(None, **settings)
    with pytest.raises(ValueError, match=r"loss mse has no loss\.memory_size: raoe, "):
        loss_settings({"name": "mse", "memory_size": 5})
    with pytest.raises(ValueError, match=r"loss\.memory_size must be 0 with matryoshka_dims"):
        loss_settings({"memory_size": 5, "matryoshka_dims": [8]})

    class Alone(PairLoss):
        name, compares_batch = "alone", False

    with pytest.raises(ValueError, match="memory_size must be 0 for Alone, which compares no pairs"):
        Alone(None, memory_size=5)


@pytest.mark.parametrize("mini_batch_size", [None, 4])
def test_several_widths_are_refused(mini_batch_size):
    model = tiny_encoder()
    loss = MatryoshkaLoss(model, RAOELoss(model, memory_size=9, mini_batch_size=mini_batch_size), [16, 4])
    (features, labels), *_ = batches(model)
    with pytest.raises(ValueError, match=r"memory_size must be 0 where embeddings are cut .* 4 and 16 dimensions"):
        loss(features, labels)


def parts(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    model = tiny_encoder()
    initial = copy.deepcopy(model.state_dict())
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        whole = CoSENTLoss(model, memory_size=20)
        expected = trained(model, initial, whole)
        parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        bounds = (0, 5, 9)

        def cut(batch):
            rows, (features, labels) = slice(bounds[rank], bounds[rank + 1]), batch
            own = [{k: v[rows] for k, v in column.items() if hasattr(v, "shape")} for column in features]
            return own, {k: v[rows] for k, v in labels.items()}

        for settings in ({}, {"mini_batch_size": 2}):
            loss = CoSENTLoss(parallel, memory_size=20, gather_across_devices="uneven", **settings)
            found = trained(model, initial, loss, cut)
            for x, y in zip(found, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
            for x, y in zip(loss.memory.buffers(), whole.memory.buffers(), strict=True):
                torch.testing.assert_close(x, y)
        del parallel, loss
    finally:
        gc.collect()
        dist.destroy_process_group()


@pytest.mark.slow
def test_processes_remember_the_same(tmp_path):
    together(parts, 2, str(tmp_path))


def test_gradients_reach_the_model():
    """Of a second batch by itself, with the first in the memory: other gradients than without."""
    model = tiny_encoder()
    found = []
    for size in (0, 9):
        loss = CoSENTLoss(model, memory_size=size)
        for features, labels in batches(model, 2):
            model.zero_grad()
            total(loss(features, labels)).backward()
        found.append(gradients(model))
    assert not torch.allclose(*found) and all(each.abs().max() > 0 for each in found)


def test_equal_scores_stay_equal():
    """0.3 in float64 is not what float32 remembers of it; two pairs of 0.3 are not compared, in any step."""
    loss = CoSENTLoss(None, memory_size=20)
    for step in range(3):
        embeddings, _ = columns(6, step)
        found = loss.compute_loss_from_embeddings(embeddings, torch.full((6,), 0.3, dtype=torch.float64))
        assert found.item() == 0
    assert loss.memory.held == 18
