"""Loss modules: the papers' formulas, sentence-transformers' conventions, caching."""

import copy
import inspect
from functools import partial

import pytest
import torch
from scipy.stats import pearsonr, rankdata
from sentence_transformers import util
from sentence_transformers.sentence_transformer import losses as stock

from raoe_train import losses as ours
from raoe_train.config import keywords_of
from raoe_train.losses import AnglELoss, CoSENTLoss, GatedAngularLoss, PearsonLoss, RankMarginLoss, RAOELoss
from raoe_train.losses.collators import ScoreLabelCollator
from tests.losses.test_infonce_loss import embeddings
from tests.tiny import REPLAYS_IN_DOUBLE, SENTENCES, batch, gradients, tiny_encoder, total

CACHED = {"rtol": 1e-9, "atol": 1e-12} if REPLAYS_IN_DOUBLE else {"rtol": 1e-3, "atol": 1e-4}
OURS = [RAOELoss, RankMarginLoss, GatedAngularLoss, CoSENTLoss, AnglELoss, PearsonLoss]


def one_plus_sum(exponents, active):
    """log(1 + sum of exp over the active ones), pair by pair."""
    return torch.log1p(torch.exp(exponents[active]).sum())


def by_definition(pair, score, label, *, scale, margin, gate):
    cosine = torch.nn.functional.cosine_similarity(*pair)
    angle = torch.arccos(cosine)
    rank = torch.from_numpy(rankdata(score.numpy()))
    i, j = torch.meshgrid(torch.arange(len(score)), torch.arange(len(score)), indexing="ij")
    rank_part = one_plus_sum(scale * (cosine[i] - cosine[j]), rank[j] - rank[i] > margin)
    gates = {"label": label[i] > label[j], "score": score[i] < score[j]}
    gates["label+score"] = gates["label"] & gates["score"]
    return rank_part, one_plus_sum(scale * (angle[j] - angle[i]), gates[gate])


def test_pearson_equals_scipy_for_any_scale():
    pair, score = embeddings(2, 11), batch(tiny_encoder(), 11)[1]["score"]
    cosine = torch.nn.functional.cosine_similarity(*pair)
    loss = PearsonLoss(None).compute_loss_from_embeddings(pair, score)
    assert loss.item() == pytest.approx(1 - pearsonr(cosine.detach(), score).statistic, abs=1e-12)
    by_hand = 1 - torch.corrcoef(torch.stack([cosine, score]))[0, 1]
    for value in (loss, PearsonLoss(None).compute_loss_from_embeddings(pair, 7 * score - 3)):
        result = (torch.autograd.grad(of, pair, retain_graph=True) for of in (value, by_hand))
        for own, its in zip(*result, strict=True):
            torch.testing.assert_close(own, its, rtol=1e-9, atol=1e-12)
    low = [each.detach().float() for each in pair]  # embeddings in float32
    for each in (1e-6 * score, 1e20 * score, score.double() + 1e6):
        assert PearsonLoss(None).compute_loss_from_embeddings(low, each).item() == pytest.approx(loss.item(), abs=1e-6)
    widths = PearsonLoss(None, matryoshka_dims=[2, 6]).compute_loss_from_embeddings(pair, score)
    narrow = PearsonLoss(None).compute_loss_from_embeddings([each[:, :2] for each in pair], score)
    assert widths.item() == pytest.approx(narrow.item() + loss.item(), abs=1e-12)
    same = torch.ones(11, 6, requires_grad=True)
    flat = PearsonLoss(None).compute_loss_from_embeddings([same, same], score)
    assert flat.item() == 1 and torch.autograd.grad(flat, same)[0].abs().max() < 1e-6
    # two cosines about their mean, of norm 1e-5, are divided by eps, 1e-4, and so count a tenth
    near = PearsonLoss(None).of_pairs(torch.tensor([0, 2**0.5 * 1e-5]), torch.tensor([0, 2**0.5]), None)
    assert near.item() == pytest.approx(0.9, abs=1e-5)
    equal = PearsonLoss(None).compute_loss_from_embeddings(pair, torch.ones(11))
    assert all(not grad.any() for grad in torch.autograd.grad(equal, pair))


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.numpy, lambda x: tuple(x.tolist())])
def test_labels_may_be_any_sequence_of_numbers(convert):
    model = tiny_encoder()
    features, labels = batch(model)
    sequences = {name: convert(values) for name, values in labels.items()}
    for loss, given, plain in ((RAOELoss, sequences, labels), (CoSENTLoss, sequences["score"], labels["score"])):
        assert total(loss(model)(features, given)).item() == total(loss(model)(features, plain)).item()
    for wrong in ("abc", ["a"] * 9, {"score": ["a"] * 9}, tuple(labels.values())):
        with pytest.raises(ValueError, match="labels of CoSENTLoss must be numbers"):
            CoSENTLoss(model)(features, wrong)


@pytest.mark.parametrize("loss", [*OURS, partial(RAOELoss, matryoshka_dims=[2, 6])])
def test_a_column_may_come_from_encode(loss):
    """model.encode(convert_to_tensor=True) makes embeddings in inference mode, which autograd cannot save."""
    pair, (_, labels) = embeddings(2, 11), batch(tiny_encoder(), 11)
    (expected,) = torch.autograd.grad(total(loss(None).compute_loss_from_embeddings(pair, labels)), pair[0])
    with torch.inference_mode():
        frozen = pair[1].detach().clone()
    found = total(loss(None).compute_loss_from_embeddings([pair[0], frozen], labels))
    torch.testing.assert_close(torch.autograd.grad(found, pair[0])[0], expected)


@pytest.mark.parametrize("gate", ["label+score", "score", "label"])
def test_raoe_equals_the_papers_formula(gate):
    pair = embeddings(2, 11)
    _, labels = batch(tiny_encoder(), 11)
    rank, angle = by_definition(pair, labels["score"], labels["label"], scale=5.0, margin=3, gate=gate)
    loss = RAOELoss(None, scale=5.0, margin=3, rank_weight=0.7, angle_weight=1.3, gate=gate)
    parts = loss.compute_loss_from_embeddings(pair, labels)
    assert list(parts) == ["rank", "angle"]
    torch.testing.assert_close(parts["rank"], 0.7 * rank)
    torch.testing.assert_close(parts["angle"], 1.3 * angle)
    # Each part is differentiable for itself.
    (of_rank,) = torch.autograd.grad(parts["rank"], pair[0], retain_graph=True)
    (expected,) = torch.autograd.grad(0.7 * rank, pair[0], retain_graph=True)
    torch.testing.assert_close(of_rank, expected)
    (of_angle,) = torch.autograd.grad(parts["angle"], pair[1])
    (expected,) = torch.autograd.grad(1.3 * angle, pair[1])
    torch.testing.assert_close(of_angle, expected)
    alone = RankMarginLoss(None, scale=5.0, margin=3).compute_loss_from_embeddings(pair, labels)
    torch.testing.assert_close(alone, rank)
    alone = GatedAngularLoss(None, scale=5.0, gate=gate).compute_loss_from_embeddings(pair, labels)
    torch.testing.assert_close(alone, angle)


@pytest.mark.parametrize(
    ("ours", "theirs", "arguments"),
    [
        (CoSENTLoss, stock.CoSENTLoss, ()),
        (CoSENTLoss, stock.CoSENTLoss, (7.5, util.pairwise_dot_score)),
        (AnglELoss, stock.AnglELoss, ()),
        (AnglELoss, stock.AnglELoss, (3.0,)),
    ],
)
def test_drop_in_for_sentence_transformers(ours, theirs, arguments):
    mine, other = embeddings(2, 11, seed=1), embeddings(2, 11, seed=1)
    scores = torch.tensor([0.1, 0.5, 0.5, 0.9, 0.2, 1.0, 0.5, 0.0, 0.3, 0.3, 0.7])
    for labels in (scores, scores[:, None], scores > 0.4):
        got = ours(None, *arguments).compute_loss_from_embeddings(mine, labels)
        expected = theirs(None, *arguments).compute_loss_from_embeddings(other, labels.reshape(-1))
        torch.testing.assert_close(got, expected)
        for a, b in zip(torch.autograd.grad(got, mine), torch.autograd.grad(expected, other), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("loss", OURS)
def test_every_form_of_labels(loss):
    pair = embeddings(2, 11)
    _, labels = batch(tiny_encoder(), 11)
    listed = torch.stack([labels["label"].double(), labels["score"]], dim=1)
    expected = total(loss(None).compute_loss_from_embeddings(pair, labels))
    assert expected > 0.1
    torch.testing.assert_close(total(loss(None).compute_loss_from_embeddings(pair, listed)), expected)
    if loss in (RankMarginLoss, CoSENTLoss, AnglELoss, PearsonLoss):
        for scores in (labels["score"], labels["score"][:, None], {"score": labels["score"]}):
            torch.testing.assert_close(loss(None).compute_loss_from_embeddings(pair, scores), expected)
    else:
        with pytest.raises(ValueError, match="needs a score and an NLI label"):
            loss(None).compute_loss_from_embeddings(pair, labels["score"])
        # Where the gate looks at scores alone no label is needed.
        loss(None, gate="score").compute_loss_from_embeddings(pair, labels["score"])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"score": torch.full((11,), float("nan"))}, "score"),
        ({"label": torch.arange(11) - 100}, "whole numbers from 0"),
        ({"label": torch.full((11,), 0.5)}, "label"),
        ({"label": torch.arange(11) / torch.arange(11)}, "whole numbers from 0"),  # the first is NaN
        ({"score": torch.zeros(10)}, "needs 11 values of score .* got 10"),
        ({"label": torch.zeros(12, dtype=torch.long)}, "label"),
    ],
)
def test_wrong_labels_are_errors(change, key):
    _, labels = batch(tiny_encoder(), 11)
    with pytest.raises(ValueError, match=key):
        RAOELoss(None).compute_loss_from_embeddings(embeddings(2, 11), {**labels, **change})
    for missing in ({"label": labels["label"]}, None):
        with pytest.raises(ValueError, match="needs a score"):
            RAOELoss(None).compute_loss_from_embeddings(embeddings(2, 11), missing)


def step(loss, model, features, labels, seed=11):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    value = total(loss([dict(column) for column in features], labels))
    value.backward()
    return value.detach(), gradients(model).clone()


def test_collator():
    model = tiny_encoder(double=False, prompt="query: {text}")
    rows = [
        {"sentence1": a, "score": score, "sentence2": b, "label": label}
        for a, b, score, label in zip(
            SENTENCES[:3], SENTENCES[3:6], [0.25, 1, 1 + 1e-12], ["neutral", "entailment", 7], strict=True
        )
    ]
    made = ScoreLabelCollator(preprocess_fn=model.preprocess, prompts="query: ")(copy.deepcopy(rows))
    assert made["label"]["score"].tolist() == [0.25, 1.0, 1 + 1e-12]  # no two are one
    assert made["label"]["label"].tolist() == [1, 0, 7] and made["label"]["label"].dtype == torch.int64
    expected = model.preprocess(SENTENCES[:3], prompt="query: ")["input_ids"]
    assert torch.equal(made["sentence1_input_ids"], expected)
    assert not torch.equal(expected, model.preprocess(SENTENCES[:3])["input_ids"])
    collate = ScoreLabelCollator(preprocess_fn=model.preprocess)
    for wrong in ({"label": "yes"}, {"label": 0.5}, {"score": None}):
        with pytest.raises(ValueError, match=f"a {next(iter(wrong))} must be"):
            collate([{**rows[2], **wrong}])
    # Other datasets as ever: a list of both, or one column of labels.
    listed = collate([{"a": "x", "b": "y", "label": [1.0, 0.5]}])
    assert listed["label"].tolist() == [[1.0, 0.5]]
    assert collate([{"a": "x", "b": "y", "label": 1}])["label"].tolist() == [1]


def test_a_temperature_is_asked_for_as_a_scale():
    """In the words of the ops, by every loss with a scale."""
    scaled = [cls for cls in (getattr(ours, name) for name in ours.__all__)
              if "scale" in keywords_of(cls) and not inspect.isabstract(cls)]  # fmt: skip
    assert len(scaled) == 11
    for cls in scaled:
        teacher = [lambda texts: texts] if "embed" in inspect.signature(cls).parameters else []
        for name in ("temperature", "tau"):
            problem = rf"{cls.__name__} has no argument '{name}' \(use scale, the inverse of a temperature\)"
            with pytest.raises(TypeError, match=problem):
                cls(None, *teacher, **{name: 0.05})
    with pytest.raises(TypeError, match=r"InfoNCELoss has no argument 'symetric' \(did you mean symmetric\?\)"):
        ours.InfoNCELoss(None, symetric=True)
