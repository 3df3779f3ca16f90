"""Batches by length give the losses and gradients of padded batches, for every encoder family and loss."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as theirs
from sentence_transformers.sentence_transformer.modules import CNN, Router, StaticEmbedding

from raoe_train import losses as ours
from raoe_train.encoders import lengths
from raoe_train.encoders.load import load_encoder
from raoe_train.losses.by_length import ByLength, misfit
from raoe_train.losses.keep import Keep
from raoe_train.training.trainer import Trainer
from tests.decoders import saved_decoder
from tests.encoders.test_packed import FAMILIES as ALL
from tests.encoders.test_packed import SIZES
from tests.losses.test_global_batch import REPLAYS_IN_DOUBLE
from tests.tiny import SENTENCES, batch, encoder_of, gradients, tiny_encoder, total
from tests.training.small_runs import arguments

FAMILIES = {name: ALL[name] for name in ("bert", "roberta", "distilbert")} | {"mpnet": SIZES}
FAMILIES["modernbert"] = ALL["modernbert"] | {"local_attention": 4}


@pytest.fixture(autouse=True)
def cheap_forwards(monkeypatch):
    """Cut small batches into several runs."""
    monkeypatch.setattr(lengths, "CPU_FORWARD", 1)


def compared(model: Any, loss: Any, features: Any, labels: Any, tolerance: float = 1e-12) -> None:
    """Compare loss and gradients by length with those of padded batches."""
    if not REPLAYS_IN_DOUBLE and getattr(loss, "uses_gradient_cache", False):
        tolerance = max(tolerance, 1e-5)
    results = []
    for each in (loss, ByLength(loss)):
        model.zero_grad()
        value = total(each([dict(column) for column in features], labels))
        value.backward()
        results.append((value.detach(), gradients(model)))
    (padded, its), (value, own) = results
    assert its.abs().max() > 0
    assert abs(value - padded) <= tolerance * abs(padded)
    assert (own - its).abs().max() <= tolerance * its.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("cached", [{}, {"mini_batch_size": 2}], ids=["at once", "cached"])
def test_every_family_of_encoders(name, cached):
    model = encoder_of(name, FAMILIES[name])
    features, labels = batch(model)
    compared(model, ours.CoSENTLoss(model, **cached), features, labels)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("settings", [{}, {"bidirectional_layers": 1}, {"prompt": 'Say "{text}" in one word:"'}])
def test_decoders_padded_on_either_side(tmp_path, side, settings):
    model = load_encoder(saved_decoder(tmp_path), device="cpu", pooling="mean", **settings).double().train(False)
    model.tokenizer.padding_side = side
    features, labels = batch(model)
    assert bool((features[0]["attention_mask"][:, 0] == 0).any()) == (side == "left")
    for cached in ({}, {"mini_batch_num_tokens": 20}):
        # transformers norms their layers in float32
        compared(model, ours.RAOELoss(model, **cached), features, labels, 1e-6)


def columns_of(model: Any, columns: int) -> list[dict[str, Any]]:
    """Columns of five distinct texts per row, some of which also occur in other rows."""
    return [model.preprocess([SENTENCES[(row + 2 * column) % 11] for row in range(7)]) for column in range(columns)]


CACHED = [{}, {"mini_batch_size": 3}, {"mini_batch_num_tokens": 12}]


@pytest.mark.parametrize("settings", CACHED, ids=["at once", "by rows", "by tokens"])
@pytest.mark.parametrize("matryoshka", [False, True])
def test_every_loss_of_raoe(settings, matryoshka):
    model = tiny_encoder()
    pairs, labels = batch(model)
    lists = [model.preprocess(SENTENCES)], {"lengths": torch.tensor([4, 7])}
    triplets = columns_of(model, 4), None
    made: list[tuple[Any, Any]] = [
        *[(loss, (pairs, labels)) for loss in (ours.RAOELoss, ours.RankMarginLoss, ours.GatedAngularLoss)],
        *[(loss, (pairs, labels)) for loss in (ours.CoSENTLoss, ours.AnglELoss)],
        (ours.InfoNCELoss, triplets),
        (ours.AnglEContrastiveLoss, triplets),
        (ours.ListMLELoss, lists),
    ]
    for loss, inputs in made:
        inner = loss(model, **settings)
        whole = theirs.MatryoshkaLoss(model, inner, [16, 8, 4], [1, 0.5, 2]) if matryoshka else inner
        compared(model, whole, *inputs)


def test_every_loss_of_sentence_transformers():
    model, guide = tiny_encoder(), tiny_encoder()
    pairs, triplets = columns_of(model, 2), columns_of(model, 3)
    cached = {"mini_batch_size": 3}
    score, classes = torch.linspace(0, 1, 7).double(), torch.tensor([0, 1, 1, 0, 1, 2, 2])
    margins = torch.linspace(-1, 1, 7).double()
    cases: list[tuple[Any, Any, Any]] = [
        (theirs.CoSENTLoss(model), pairs, score),
        (theirs.AnglELoss(model), pairs, score),
        (theirs.CosineSimilarityLoss(model), pairs, score),
        (theirs.ContrastiveLoss(model), pairs, classes > 0),
        (theirs.OnlineContrastiveLoss(model), pairs, classes > 0),
        (ours.SoftmaxLoss(model).double(), pairs, classes),
        (theirs.MultipleNegativesRankingLoss(model), triplets, None),
        (theirs.TripletLoss(model), triplets, None),
        (theirs.MarginMSELoss(model), triplets, margins),
        (theirs.BatchAllTripletLoss(model), pairs[:1], classes),
        (theirs.BatchHardTripletLoss(model), pairs[:1], classes),
        (theirs.GlobalOrthogonalRegularizationLoss(model), pairs, None),
        (theirs.MatryoshkaLoss(model, theirs.CoSENTLoss(model), [16, 8, 4]), pairs, score),
        (theirs.MatryoshkaLoss(model, theirs.MultipleNegativesRankingLoss(model), [16, 4], [1, 0.3]), triplets, None),
        (theirs.SoftmaxLoss(model, 16, 3).double(), pairs, classes),
        (theirs.CachedMultipleNegativesRankingLoss(model, **cached), triplets, None),
        (theirs.CachedMultipleNegativesRankingLoss(model, mini_batch_num_tokens=20), triplets, None),
        (theirs.CachedMultipleNegativesSymmetricRankingLoss(model, **cached), pairs, None),
        (theirs.MatryoshkaLoss(model, theirs.CachedMultipleNegativesRankingLoss(model, **cached), [9]), pairs, None),
        (theirs.GISTEmbedLoss(model, guide), triplets, None),
        (theirs.CachedGISTEmbedLoss(model, guide, **cached), triplets, None),
        (theirs.MegaBatchMarginLoss(model, use_mini_batched_version=False), pairs, None),
        (theirs.MSELoss(model), pairs, torch.eye(16)[:7].double()),
        (theirs.EmbedDistillLoss(model, "cosine"), pairs, torch.arange(1.0, 225.0).view(7, 2, 16).double()),
        (theirs.MatryoshkaLoss(model, theirs.MSELoss(model), [8]), pairs, torch.eye(16)[:7].double()),
    ]  # fmt: skip
    for loss, features, labels in cases:
        if isinstance(labels, torch.Tensor) and labels.dtype == torch.bool:
            labels = labels.long()
        compared(model, loss, features, labels)


def test_losses_that_read_more_than_embeddings():
    model = tiny_encoder()

    class Own(ours.CoSENTLoss):
        """A loss whose forward reads tokens."""

        def forward(self, sentence_features, labels=None):
            return super().forward(sentence_features, labels) + sentence_features[0]["input_ids"].shape[1]

    layers = theirs.AdaptiveLayerLoss(model, theirs.CoSENTLoss(model))
    for loss in (layers, Own(model)):
        assert misfit(loss)
    assert not misfit(theirs.CoSENTLoss(model))
    with pytest.raises(ValueError, match=r"wrap this loss: AdaptiveLayerLoss may need more.*CachedLoss"):
        ByLength(layers)
    for each in (theirs.CoSENTLoss, None):
        with pytest.raises(ValueError, match=r"wrap this loss: .* is not a loss: pass .* such as CoSENTLoss\(model\)"):
            ByLength(each)
    model.append(torch.nn.BatchNorm1d(16))
    for loss in (theirs.CoSENTLoss(model), theirs.MatryoshkaLoss(model, ours.CoSENTLoss(model), [8])):
        assert misfit(loss) == "BatchNorm1d in the encoder mixes the texts in a batch"


WIDE = {**SIZES, "embedding_size": 16}
READ_PADDING: dict[str, dict[str, Any]] = {
    "fnet": SIZES,
    "yoso": SIZES,
    "convbert": {**WIDE, "head_ratio": 1, "conv_kernel_size": 3},
    "mobilebert": {**WIDE, "true_hidden_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    "cnn": {},
}


@pytest.mark.parametrize("kind", READ_PADDING)
def test_encoders_that_read_padding_get_padded_batches(tmp_path, caplog, kind):
    model = tiny_encoder() if kind == "cnn" else encoder_of(kind, READ_PADDING[kind])
    if kind == "cnn":
        model.insert(1, CNN(16, 16, [3, 5]).double())
        model[2].embedding_dimension = 32
    elif kind == "mobilebert":  # with its own padding row, zeros, it reads no padding
        assert not misfit(ours.CoSENTLoss(model))
        model[0].model.embeddings.word_embeddings.weight.data[model.tokenizer.pad_token_id] = 1
    for settings in ({}, {"mini_batch_size": 2}):
        trainer = Trainer(model, arguments(tmp_path), loss=ours.CoSENTLoss(model, **settings))
        assert isinstance(trainer.loss, ours.CoSENTLoss)
        assert "batches stay padded: padding changes the embedding of a text by " in caplog.text
    with pytest.raises(ValueError, match=r"cannot wrap this loss: padding changes the embedding of a text by [\d.]+%"):
        ByLength(ours.CoSENTLoss(model))


def test_the_probe_of_padding_leaves_no_trace():
    """It costs two small forward passes, and does not change modes, gradients or the random state."""
    model, shapes = tiny_encoder(dropout=0.5), list[Any]()
    model.train()[0].model.embeddings.eval()
    model[0].register_forward_pre_hook(lambda module, given: shapes.append(given[0]["input_ids"].shape[0]))
    modes, state = [each.training for each in model.modules()], torch.get_rng_state()
    assert misfit(ours.CoSENTLoss(model)) is None and sorted(shapes) == [1, 2]
    assert [each.training for each in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    tokenizer = model.tokenizer.backend_tokenizer
    routes = {kind: [StaticEmbedding(tokenizer, embedding_dim=8)] for kind in ("query", "document")}
    for other in (routes["query"], [Router(routes)]):  # nothing to probe: columns of tokens without padding
        assert misfit(ours.CoSENTLoss(SentenceTransformer(modules=other))) is None
    fnet = [*encoder_of("fnet", SIZES)]
    routed = SentenceTransformer(modules=[Router({"query": routes["query"], "document": fnet})])
    assert "padding changes" in str(misfit(ours.CoSENTLoss(routed)))


def test_other_threads_can_encode_during_a_step():
    """They may encode words that no text of the batch has."""
    model = tiny_encoder()
    plain, seen = model.encode(SENTENCES[5]), []

    def encode_beside(module, given):
        if not seen:
            seen.append(None)
            thread = Thread(target=lambda: seen.append(model.encode(SENTENCES[5])))
            thread.start()
            thread.join()

    model[0].register_forward_pre_hook(encode_beside)
    ByLength(ours.CoSENTLoss(model))([model.preprocess(["dog", "a dog"]), model.preprocess(["dog", "dog a"])], [0, 1])
    assert (seen[1] == plain).all()


def test_the_regularizer_of_columns_that_have_no_length():
    """Columns of a StaticEmbedding are not planned."""
    tokenizer = tiny_encoder().tokenizer.backend_tokenizer
    model, first = (SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)]) for _ in range(2))
    features, keep = columns_of(model, 3), Keep(first, 0.3)
    now, before = (torch.cat([m(dict(each))["sentence_embedding"] for each in features]) for m in (model, first))
    for loss in (ours.InfoNCELoss(model), ours.InfoNCELoss(model, mini_batch_size=2)):
        value = total(ByLength(loss, keep=keep)([dict(each) for each in features], None))
        expected = loss([dict(each) for each in features], None) + keep(now, before)
        assert value.item() == pytest.approx(expected.item(), rel=1e-6)


def test_cached_gradients_do_not_depend_on_autocast():
    """The caller's autocast would compute products of the loss's backward pass in bfloat16."""
    gradients = []
    for enabled in (False, True):
        table = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            ours.ListMLELoss(None, mini_batch_size=2).calculate_loss(
                [[table]], {"labels": {"lengths": torch.tensor([6])}}, with_backward=True
            )
        gradients.append(table.grad)
    assert torch.equal(*gradients)


def test_each_text_is_computed_once():
    model = tiny_encoder()
    texts = [" ".join(["dog"] * length) for length in [1] * 20 + [2] * 20 + [9] * 20]
    features = [model.preprocess(texts), model.preprocess(texts[::-1])]
    shapes = []
    loss = ByLength(ours.InfoNCELoss(model))
    model[0].register_forward_pre_hook(lambda module, given: shapes.append(given[0]["input_ids"].shape))
    loss.forward(features)
    widths = {shape[1] for shape in shapes}
    assert sum(shape[0] for shape in shapes) == 3 + 1  # the text of 2 dogs meets itself in a row: two views
    assert len(widths) <= 3


def test_dropout_of_cached_batches_is_replayed():
    """The cached gradient equals a finite difference of the loss with equal dropout."""
    model = tiny_encoder(dropout=0.3)
    features, labels = batch(model)
    weight = model[0].model.embeddings.word_embeddings.weight

    def value(settings: dict[str, Any]) -> Any:
        torch.manual_seed(7)
        return total(ByLength(ours.CoSENTLoss(model, **settings))([dict(each) for each in features], labels))

    model.zero_grad()
    settings = {"mini_batch_num_tokens": 24}
    value(settings).backward()
    direction, step = weight.grad.clone(), 1e-6
    with torch.no_grad():
        weight += step * direction
        up = value(settings)
        weight -= 2 * step * direction
        down = value(settings)
    assert abs((up - down) / (2 * step) / direction.square().sum() - 1) < 1e-5


def test_gradient_checkpointing_and_autocast():
    model = tiny_encoder(double=False)
    features, labels = batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        compared(model, ours.CoSENTLoss(model), features, labels, 0.05)
    model.transformers_model.gradient_checkpointing_enable({"use_reentrant": False})
    compared(model, ours.CoSENTLoss(model), features, labels, 1e-5)


def test_batches_without_tokens_are_unchanged():
    class Means(torch.nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["pixel_values"].mean(1)}

    model = Means()
    images = [{"pixel_values": torch.randn(5, 3, 4, requires_grad=True)} for _ in range(2)]
    score = torch.rand(5)
    assert ByLength(theirs.CoSENTLoss(model))(images, score) == theirs.CoSENTLoss(model)(images, score)
