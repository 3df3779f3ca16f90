"""Prompts with text on both sides of the sentence: token ids, truncation, padding, and saved models."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from raoe_train.encoders.prompts import apply_template, parse_template, suffix_of
from tests.tiny import SENTENCES, tiny_encoder

WORD = 'Summarize sentence {text} in one word:"'
OTHER = 'The representative word for sentence {text} is:"'
LINES = [*SENTENCES, WORD, OTHER, "Zürich is 7"]
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


# --- tokenizers of every kind, made here ---


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(tokenizer, trainers.BpeTrainer, alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace():
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return trained(tokenizer, trainers.BpeTrainer, more=[f"<0x{byte:02X}>" for byte in range(256)])


def trained(tokenizer, trainer, more=(), alphabet=()):
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<bos>", "<eos>", *more]
    settings = {"unk_token": "<unk>"} if trainer is trainers.UnigramTrainer else {"initial_alphabet": alphabet}
    tokenizer.train_from_iterator(
        LINES, trainer(vocab_size=400, special_tokens=special, show_progress=False, **settings)
    )
    return tokenizer


def parts(tokenizer):
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(merge) for merge in model["merges"]]}


def qwen2():
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    chat = "{% for message in messages %}{{ message['content'] }}!{% endfor %}"
    return transformers.Qwen2Tokenizer(**parts(byte_level()), **special, chat_template=chat), transformers.Qwen2Config


def gpt2():
    special = {"unk_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"}
    tokenizer = transformers.GPT2Tokenizer(**parts(byte_level()), **special, add_bos_token=True)
    return tokenizer, lambda **sizes: transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=400)


def llama2(**settings):
    special = {"add_bos_token": True, "pad_token": "<pad>", "padding_side": "left"}
    return transformers.LlamaTokenizer(**parts(metaspace()), **special, **settings), transformers.LlamaConfig


def roberta():
    return transformers.RobertaTokenizer(**parts(byte_level())), transformers.RobertaConfig


def xlm_roberta():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    vocabulary = json.loads(trained(tokenizer, trainers.UnigramTrainer).to_str())["model"]["vocab"]
    made = transformers.XLMRobertaTokenizer(vocab=[tuple(entry) for entry in vocabulary])
    return made, transformers.XLMRobertaConfig


def bert():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(LINES, trainers.WordPieceTrainer(special_tokens=special, show_progress=False))
    return transformers.BertTokenizer(vocab=tokenizer.get_vocab()), transformers.BertConfig


KINDS = {made.__name__: made for made in (qwen2, gpt2, llama2, roberta, xlm_roberta, bert)}


def by_hand(processor):
    """A tokenizer whose ids are known: one a word."""
    words = ["<s>", "<pad>", "</s>", "<unk>", "say", "dog", "cat", "runs", "now", ':"', "is"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.post_processor = pre_tokenizers.Whitespace(), processor
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special), transformers.BertConfig


ENDS = {
    "template": processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 2)]
    ),
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 0)),
}


def encoder(made, folder, pooling="mean", **settings):
    tokenizer, config = made
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(1)
    body = transformers.AutoModel.from_config(config(**{**SIZES, "vocab_size": len(tokenizer), **special}))
    body.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = Transformer(str(folder), max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(16, pooling, **settings)], device="cpu").eval()


@pytest.fixture
def hand(tmp_path):
    def make(processor=ENDS["template"], pooling="mean", **settings):
        return encoder(by_hand(processor), tmp_path, pooling, **settings)

    return make


def ids(model, *texts, prompt=None):
    prompt = model.prompts["default"] if prompt is None else prompt
    return model.preprocess(list(texts), prompt=prompt)["input_ids"].tolist()


# --- the template ---


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (WORD, ("Summarize sentence ", ' in one word:"')),
        ("query: {text}", ("query: ", "")),
        ("{text}", ("", "")),
        ("{text} is", ("", " is")),
        ("{{a}} {text} }}{{", ("{a} ", " }{")),
    ],
)
def test_template_is_split_into_prefix_and_suffix(template, expected):
    assert parse_template(template) == expected


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("query: ", r"must contain \{text\}.*exactly once; it occurs 0 times"),
        ("{text} and {{text}} and {text}", r"occurs 2 times"),
        ("Given {condition}, {text} in {}", r"the field 'condition' must be \{text\}, without a conversion"),
        ("{text:>9}", r"the field 'text' must be \{text\}, without a conversion"),
        ("{text", r"write \{\{ or \}\} for a literal brace"),
    ],
)
def test_invalid_template_is_named(template, problem):
    with pytest.raises(ValueError, match=problem):
        parse_template(template)


# --- the tokens ---


@pytest.mark.parametrize("processor", ENDS)
def test_the_suffix_follows_the_text_and_precedes_the_last_special_token(hand, processor):
    model = hand(ENDS[processor])
    apply_template(model, 'say {text} is:"')
    assert ids(model, "dog runs") == [[0, 4, 5, 7, 10, 9, 2]]
    assert suffix_of(model) == ' is:"'
    assert model[0].preprocess(["dog"], prompt="")["input_ids"].tolist() == [[0, 5, 10, 9, 2]]
    assert model.tokenizer("dog", add_special_tokens=False)["input_ids"] == [5]


def test_a_second_template_replaces_the_first(hand):
    model = hand(pooling="lasttoken")
    apply_template(model, 'say {text} is:"')
    assert ids(model, "dog") == [[0, 4, 5, 10, 9]]
    apply_template(model, "{text} now")
    assert (ids(model, "dog"), suffix_of(model), model.prompts["default"]) == ([[0, 5, 8]], " now", "")
    apply_template(model, "say {text}")
    features = model.preprocess(["dog"], prompt="say ")
    assert (features["input_ids"].tolist(), features["prompt_length"], suffix_of(model)) == ([[0, 4, 5, 2]], 2, "")


def test_the_tokenizer_keeps_its_settings(tmp_path):
    settings = {"model_max_length": 40, "padding_side": "left", "model_input_names": ["input_ids"],
                "chat_template": "{{ messages }}"}  # fmt: skip
    tokenizer, config = roberta()
    tokenizer.add_special_tokens({"mask_token": AddedToken("<blank>", lstrip=True, special=True)})
    model = encoder((tokenizer, config), tmp_path)
    for name, value in settings.items():
        setattr(model.tokenizer, name, value)
    apply_template(model, "{text} is")
    assert {name: getattr(model.tokenizer, name) for name in settings} == settings
    assert model.tokenizer.special_tokens_map == tokenizer.special_tokens_map
    added = model.tokenizer.added_tokens_decoder
    assert all(repr(added[number]) == repr(token) for number, token in tokenizer.added_tokens_decoder.items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_filled_in_template(kind, tmp_path):
    model = encoder(KINDS[kind](), tmp_path)
    plain = model.tokenizer
    for template in (WORD, OTHER, 'This sentence: "{text}" is a word:'):
        apply_template(model, template)
        for text in ("two dogs run", "7", "Zürich", "a train, late"):
            expected = plain(template.replace("{text}", text))
            features = model.preprocess([text], prompt=model.prompts["default"])
            assert {name: features[name][0].tolist() for name in expected} == dict(expected)


@pytest.mark.parametrize("length", [20, 27])
@pytest.mark.parametrize("kind", KINDS)
def test_truncation_cuts_the_sentence_alone(kind, length, tmp_path):
    model = encoder(KINDS[kind](), tmp_path)
    apply_template(model, "the {text} is:")
    model.max_seq_length = 999
    full, empty = ids(model, "long birds " * 60)[0], ids(model, "7")[0]
    ending = next(n for n in range(len(empty)) if full[-n - 1] != empty[-n - 1])
    model.max_seq_length = length
    assert len(full) > 2 * length
    assert ids(model, "long birds " * 60) == [full[: length - ending] + full[-ending:]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_goes_around_the_suffix(hand, side):
    model = hand()
    model.tokenizer.padding_side = side
    apply_template(model, 'say {text} is:"')
    features = model.preprocess(["dog runs", "cat"], prompt="say ")
    short, pad = [0, 4, 6, 10, 9, 2], [1]
    assert features["input_ids"].tolist()[1] == (pad + short if side == "left" else short + pad)
    assert features["attention_mask"].tolist()[1] == ([0] + [1] * 6 if side == "left" else [1] * 6 + [0])
    both, alone = model.encode(["dog runs", "cat"]), model.encode("cat")
    if side == "right":  # BERT counts positions from the left, so its vectors depend on padding there
        assert both[1] == pytest.approx(alone, abs=1e-6)


def test_encode_and_the_trainers_collator_use_the_template(hand):
    model = hand()
    bare = model.encode(["say dog is", "dog"])
    model.prompts = {"query": "the ", "passage": "a ", "STS": "own "}
    apply_template(model, "say {text} is")
    assert model.prompts == {**dict.fromkeys(("query", "passage", "default"), "say "), "STS": "own "}
    for encode in (model.encode, model.encode_query, model.encode_document):
        assert encode("dog") == pytest.approx(bare[0], abs=1e-6)
    collate = SentenceTransformerDataCollator(preprocess_fn=model.preprocess, prompts="say ")
    batch = collate([{"text1": "dog", "text2": "cat runs", "score": 1.0}])
    assert batch["text1_input_ids"].tolist() == [[0, 4, 5, 10, 2]]
    assert batch["text2_input_ids"].tolist() == [[0, 4, 6, 7, 10, 2]]


# --- saved ---

FRESH = """
import json, sys
from sentence_transformers import SentenceTransformer
texts = json.loads(sys.argv[1])
for folder in sys.argv[2:]:
    model = SentenceTransformer(folder, device="cpu")
    features = model.preprocess(texts, prompt=model.prompts["default"])
    print(json.dumps([model.default_prompt_name, features["input_ids"].tolist(), model.encode(texts).tolist()]))
assert "raoe_train" not in sys.modules
"""


@pytest.mark.slow
def test_the_stock_library_applies_the_saved_template_in_a_fresh_process(tmp_path):
    texts = ["two dogs run", "long birds " * 60, "7"]
    expected = {}
    for kind, made in KINDS.items():
        folder = tmp_path / kind
        model = encoder(made(), tmp_path / "before" / kind, "mean" if "bert" in kind else "lasttoken")
        apply_template(model, WORD)
        model.max_seq_length = 48
        model.save_pretrained(str(folder))
        expected[str(folder)] = ["default", ids(model, *texts), model.encode(texts)]
        loaded = SentenceTransformer(str(folder), device="cpu")
        assert suffix_of(loaded) == ' in one word:"', kind
        assert loaded.tokenizer.padding_side == model.tokenizer.padding_side, kind
        apply_template(loaded, "{text} is:")  # and again, on what was loaded
        apply_template(model, "{text} is:")
        assert ids(loaded, *texts) == ids(model, *texts), kind
    command = [sys.executable, "-c", FRESH, json.dumps(texts), *expected]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    for folder, line in zip(expected, process.stdout.splitlines(), strict=True):
        name, tokens, vectors = json.loads(line)
        assert [name, tokens] == expected[folder][:2], folder
        assert torch.tensor(vectors).allclose(torch.from_numpy(expected[folder][2]), atol=1e-6), folder


# --- invalid input ---


def refused(model, template, problem):
    """The error is raised and the model is unchanged."""
    tokenizer, prompts = model[0].processor, dict(model.prompts)
    with pytest.raises(ValueError, match=problem):
        apply_template(model, template)
    assert model[0].processor is tokenizer and model.prompts == prompts and model.default_prompt_name is None


def test_a_suffix_whose_tokens_depend_on_the_text_is_refused(tmp_path):
    model = encoder(gpt2(), tmp_path)
    refused(model, "{text}ing", "must be tokenized in the same way after every word")
    refused(tiny_encoder(), "{text} ", "must be tokenized in the same way after every word")


def test_no_room_for_text_is_refused(hand):
    model = hand()
    model.max_seq_length = 5
    assert ids(model, "dog runs now now", prompt="") == [[0, 5, 7, 8, 2]]
    refused(model, "say say say {text}", "takes 5 tokens")
    refused(model, 'say {text} is:"', r"takes 5 tokens.* max_seq_length is 5")
    model.max_seq_length = 6
    apply_template(model, 'say {text} is:"')
    assert ids(model, "dog runs now") == [[0, 4, 5, 10, 9, 2]]
