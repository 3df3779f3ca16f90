"""Degradation, intra-sentence dependency and representative words, each against a second implementation."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from raoe_train.data.files import write_rows
from raoe_train.encoders.bidirectional.configuration import ARCHITECTURES
from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
from raoe_train.encoders.load import load_encoder
from raoe_train.encoders.settings import Model, Scratch
from raoe_train.evaluation.analyses import (
    degradation,
    first_layers,
    frequent_words,
    is_decoder,
    language_head,
    pivot_correlations,
    representative_words,
    summary,
    token_states,
    word_report,
)
from raoe_train.evaluation.tasks import read_tasks
from tests.evaluation.encoder import evaluate_encoder
from tests.tiny import SENTENCES

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "head_dim": 8,
    "pad_token_id": 0,
    "sliding_window": 4,
}
PROMPT = 'The word for {text} is:"'


def encoder(architecture="llama", layers=3, **settings):
    scratch = Scratch(
        architecture=architecture,
        vocab_size=300,
        hidden_size=16,
        layers=layers,
        heads=2,
        intermediate_size=16,
        dropout=0.1,
    )
    config = Model(name="scratch", device="cpu", max_seq_length=40, scratch=scratch, **settings)
    return spread(load_encoder(config, sentences=SENTENCES).double())


def spread(model):
    """Larger weights, so that every layer matters."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


class Wrapper:
    """The parts of a SentenceTransformer that first_layers reads."""

    def __init__(self, model):
        self.first = nn.Module()
        self.first.model = model

    def __getitem__(self, place):
        return [self.first][place]


def decoder(architecture, **changes):
    torch.manual_seed(3)
    return spread(AutoModel.from_config(CONFIG_MAPPING[architecture](**{**SIZES, **changes})).double()).eval()


def shorter(whole, count):
    """A new model of fewer layers with the weights of the first ones."""
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    model = type(whole)(config).double().eval()
    assert not model.load_state_dict(whole.state_dict(), strict=False).missing_keys
    return model


def states(model, **changes):
    ids = torch.arange(1, 15).reshape(2, 7)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **changes).last_hidden_state[mask.bool()]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "bert", "distilbert", "modernbert"])
def test_first_layers_of_every_architecture(architecture):
    whole = decoder(architecture)
    before = states(whole)
    for count in (1, 3, 4):
        with first_layers(Wrapper(whole), count):
            torch.testing.assert_close(states(whole), states(shorter(whole, count)))
    assert torch.equal(states(whole), before)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_first_layers_that_look_both_ways(architecture, layers):
    plain = decoder(architecture)
    whole = BidirectionalModel.around(copy.deepcopy(plain), layers).eval()
    before = states(whole)
    for count in (1, 2, 3):
        expected = BidirectionalModel.around(shorter(plain, count), max(0, layers - (4 - count))).eval()
        with first_layers(Wrapper(whole), count):
            torch.testing.assert_close(states(whole), states(expected))
        assert torch.equal(states(whole), before)


def test_first_layers_restores_after_an_error():
    model = encoder(bidirectional_layers=2)
    decoder, before = model[0].model.decoder, model.encode(SENTENCES)
    layers, hooks = decoder.layers, [len(layer._forward_hooks) for layer in decoder.layers]
    with pytest.raises(RuntimeError), first_layers(model, 2):
        assert len(decoder.layers) == 2
        raise RuntimeError
    assert decoder.layers is layers and [len(layer._forward_hooks) for layer in layers] == hooks
    assert np.array_equal(model.encode(SENTENCES), before)


@pytest.fixture
def task(tmp_path):
    rows = [
        {"sentence1": SENTENCES[i % 11], "sentence2": SENTENCES[(5 * i + 2) % 11], "score": 7 * i % 11 / 2}
        for i in range(15)
    ]
    write_rows(tmp_path / "a.jsonl", list(rows[0]), rows)
    write_rows(tmp_path / "b.jsonl", list(rows[0]), rows[4:])
    return tmp_path


def test_degradation(task):
    model = encoder().train()
    result = degradation(model, read_tasks(["a", "b"], task), None, batch_size=4)
    assert model.training and result["layers"] == [1, 2, 3]
    whole = model[0].model
    for place, count in enumerate(result["layers"]):
        model[0].model = shorter(whole, count)
        expected = evaluate_encoder(model, ["a", "b"], task)
        for name in "ab":
            assert result["tasks"][name][place] == pytest.approx(expected["tasks"][name]["spearman"])
        assert result["average"][place] == pytest.approx(expected["average"])
    assert len(set(result["average"])) == 3


def test_degradation_refuses_unknown_models():
    albert = AutoModel.from_config(CONFIG_MAPPING["albert"](**SIZES, embedding_size=8))
    with pytest.raises(ValueError, match="'albert'"), first_layers(Wrapper(albert), 1):
        pass
    albert.layers = nn.ModuleList([nn.Identity()])  # not those of its configuration
    with pytest.raises(ValueError, match="'albert'"), first_layers(Wrapper(albert), 1):
        pass


def by_hand(model, text, pivot):
    """One unpadded sentence, one pair of tokens at a time."""
    features = model.preprocess([text], prompt=model.prompts.get("default"))
    with torch.no_grad():
        hidden = model[0](features)["token_embeddings"][0].numpy()
    pivot %= len(hidden)
    return np.mean([stats.spearmanr(hidden[pivot], row).statistic for i, row in enumerate(hidden) if i != pivot])


@pytest.mark.parametrize(
    "settings, place",
    [
        ({"architecture": "llama"}, -1),
        ({"architecture": "llama", "prompt": PROMPT, "pooling": "last"}, -1),
        ({"architecture": "llama", "bidirectional_layers": 2, "pooling": "mean"}, -1),
        ({"architecture": "bert"}, 0),
    ],
)
@pytest.mark.parametrize("side", ["right", "left"])
def test_dependency(settings, place, side):
    if side == "left" and settings["architecture"] == "bert":
        pytest.skip("its positions count the padding before a text")
    model = encoder(**settings).train()
    expected = [by_hand(model.eval(), text, place) for text in SENTENCES]
    model.train().tokenizer.padding_side = side
    results = [pivot_correlations(model, SENTENCES, batch_size=size) for size in (1, 4, 64)]
    assert model.training and results[0].dtype == np.float64
    for values in results:
        np.testing.assert_allclose(values, expected, atol=1e-9)
    assert np.ptp(expected) > 0.01


def test_dependency_has_mean_ranks_and_nan_where_undefined(monkeypatch):
    rows = {
        "ties": [[1.0, 1, 2, 3], [4, 4, 4, 9], [3, 2, 2, 1]],
        "one token": [[1, 2, 3, 4]],
        "constant": [[1, 1, 1, 1], [1, 2, 3, 4]],
    }
    monkeypatch.setattr(
        "raoe_train.evaluation.analyses.token_states",
        lambda *_: iter([(list(rows), [torch.tensor(value, dtype=torch.float32) for value in rows.values()])]),
    )
    monkeypatch.setattr("raoe_train.evaluation.analyses.is_decoder", lambda _: True)
    ties, *undefined = pivot_correlations(None, ["ties", "one token", "constant"])
    # ranks 4 2.5 2.5 1 | 1.5 1.5 3 4 | 2 2 2 4, centred 1.5 0 0 -1.5 | -1 -1 .5 1.5 | -.5 -.5 -.5 1.5
    first, second = -3.75 / np.sqrt(4.5 * 4.5), -3 / np.sqrt(4.5 * 3)
    assert ties == pytest.approx((first + second) / 2)
    assert np.isnan(undefined).all()


def test_what_is_a_decoder():
    assert is_decoder(encoder("llama", pooling="cls"))
    assert is_decoder(encoder("llama", bidirectional_layers="all"))
    assert not is_decoder(encoder("bert", pooling="last"))


def test_token_states():
    model = encoder()
    text = "two dogs"
    sizes = [len(texts) for texts, _ in token_states(model, [*SENTENCES, text, text], 5)]
    assert sizes == [5, 5, 2]
    with pytest.raises(ValueError, match="at least one"):
        next(token_states(model, []))
    with torch.no_grad():
        model[0].model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        next(token_states(model, [text]))


def test_summary():
    assert summary(np.array([0.1, np.nan, 0.2, 0.3, 0.8, 0.4])) == {
        "sentences": 6,
        "undefined": 1,
        "mean": pytest.approx(0.36),
        "lower_quartile": pytest.approx(0.2),
        "median": pytest.approx(0.3),
        "upper_quartile": pytest.approx(0.4),
    }
    assert summary(np.array([np.nan]))["mean"] is None


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A causal language model whose head is not its embedding, with its tokenizer; and it without a head."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = encoder(layers=2)
    config = copy.deepcopy(model[0].model.config)
    config.tie_word_embeddings = False
    whole = spread(AutoModelForCausalLM.from_config(config).double()).eval()
    for name, part in (("whole", whole), ("headless", whole.model)):
        part.save_pretrained(folder / name)
        model.tokenizer.save_pretrained(folder / name)
    return folder


def written(whole, tokenizer, text):
    """The next tokens that the language model would write."""
    features = tokenizer([text], return_tensors="pt", truncation=True)
    with torch.no_grad():
        logits = whole(**features).logits[0, -1]
    return tokenizer.decode([int(logits.argmax())]).strip()


@pytest.mark.parametrize("side", ["right", "left"])
def test_words_of_tied_embeddings(side):
    model = encoder(pooling="last", prompt=PROMPT)
    whole = AutoModelForCausalLM.from_config(model[0].model.config).double().eval()
    whole.model.load_state_dict(model[0].model.state_dict())
    prefix = model.prompts["default"]
    expected = [written(whole, model.tokenizer, prefix + text) for text in SENTENCES]
    model.tokenizer.padding_side = side
    for size in (1, 4, 64):
        assert representative_words(model, SENTENCES, batch_size=size) == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize("settings", [{}, {"bidirectional_layers": 0}, {"lora": {"r": 2}}])
def test_words_of_a_saved_head(checkpoint, settings):
    config = Model(name=str(checkpoint / "whole"), pooling="last", device="cpu", **settings)
    model = load_encoder(config, train=True)
    if settings:  # the base model's name is known then, whatever the decoder says of its own
        model[0].model.decoder.config._name_or_path = "elsewhere"
    whole = AutoModelForCausalLM.from_pretrained(checkpoint / "whole").eval()
    expected = [written(whole, model.tokenizer, text) for text in SENTENCES]
    assert representative_words(model, SENTENCES) == expected
    assert len(set(expected)) > 2


def test_no_head(checkpoint):
    model = load_encoder(Model(name=str(checkpoint / "headless"), device="cpu"))
    with pytest.raises(ValueError, match="is an incomplete language model: it has no lm_head"):
        language_head(model)
    model[0].model.config._name_or_path = str(checkpoint / "none")
    with pytest.raises(OSError, match="none"):
        language_head(model)
    model[0].model.config._name_or_path = ""
    with pytest.raises(ValueError, match="head cannot be found"):
        language_head(model)
    with pytest.raises(ValueError, match="'bert' is not a decoder"):
        representative_words(encoder("bert"), SENTENCES)


def test_frequent_words():
    corpus = ["The cat, the dog.", "the CAT isn't there", "a dog"]  # the 3, cat 2, dog 2, a isn't there
    assert frequent_words(corpus, 2) == {"the", "cat"}
    assert frequent_words(corpus, 3) == {"the", "cat", "dog"}
    assert frequent_words(corpus, 100) == {"the", "cat", "dog", "a", "isn't", "there"}
    with pytest.raises(ValueError, match="no words"):
        frequent_words(["..."], 1)


def test_word_report(monkeypatch):
    model = encoder()
    words = iter(["A", "the", "the", "."])
    model.tokenizer.decode = lambda _: next(words)
    monkeypatch.setattr("raoe_train.evaluation.analyses.TOP", 1)
    monkeypatch.setattr("raoe_train.evaluation.analyses.EXAMPLES", 2)
    sentences = sorted(["a man plays a guitar", "two dogs", "it sleeps"], key=len, reverse=True)
    report = word_report(model, [*sentences, sentences[0]])
    assert report == {
        "sentences": 4,
        "top": 1,
        "frequent_share": 0.5,
        "rare_share": 0.5,
        "wordless_share": 0.0,
        "most_common": [["A", 2], ["the", 2]],
        "examples": [[sentences[0], "A"], [sentences[1], "the"]],
    }
    words = iter(["."] * 3)
    assert word_report(model, sentences)["wordless_share"] == 1
    with pytest.raises(ValueError, match="no words"):
        word_report(None, ["..."])  # before the model runs


def test_the_plot_of_degradation(task, drawn, tmp_path, monkeypatch):
    """An undefined average leaves a gap."""
    averages = iter([None, 40.0, 30.0])
    monkeypatch.setattr(
        "raoe_train.evaluation.analyses.evaluate_tasks", lambda *_: {"tasks": {"a": {}}, "average": next(averages)}
    )
    degradation(encoder(), read_tasks(["a"], task), tmp_path / "found.json")
    (axes,) = drawn[0].axes
    assert (tmp_path / "found-degradation.png").stat().st_size > 1000
    (curve,) = axes.lines
    np.testing.assert_array_equal(curve.get_xdata(), [1, 2, 3])
    np.testing.assert_array_equal(np.asarray(curve.get_ydata(), dtype=float), [np.nan, 40, 30])
