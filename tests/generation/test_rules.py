"""Instructions, rules and starts of chains."""

import pytest

from raoe_train.generation.chains import REDRAWS, Chain, read_starts
from raoe_train.generation.guided import Answer
from raoe_train.generation.instructions import (
    FEW_SHOT,
    Instructions,
    numbered,
    parse_list,
    texts,
    verify_chain,
    verify_sentence,
)
from raoe_train.settings import Generation, Sentences
from tests.tiny import tiny_encoder

SOURCE = "A man plays a guitar on the stage."


class Letters:
    """A tokenizer of characters with the methods that templates need."""

    chat_template = None
    eos_token_id = 3

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [*([1] if add_special_tokens else []), *map(ord, text)]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"


class Chatting(Letters):
    chat_template = "there is one"


def read(ids):
    return "".join(map(chr, ids))


# Instructions


def test_the_papers_prompts():
    example = texts()["example"]
    guided = Instructions(Letters(), "guided", 32).text(SOURCE)
    assert guided.startswith("Rewrite the following sentence or phrase using different words and sentence structure")
    assert guided.endswith("Write a sentence that is entailment with:A man plays a guitar on the stage..\n\nResult:")
    iterative = Instructions(Letters(), "iterative", 32).text(SOURCE)
    assert "should introduce a subtle variation in meaning. Do not lose the core idea" in iterative
    assert "\n\nHere is the sentence: A man plays a guitar on the stage.\n\nYour response should" in iterative
    single = Instructions(Letters(), "single-step", 32).text(SOURCE)
    assert "generate a sequence of 32 sentences that gradually and progressively diverge" in single
    assert "1. The cat is resting on the cozy windowsill.\n2. The cat is lying on a soft cushion by the" in single
    assert f"\n32. {example[-1]}\n\nHere is the sentence: A man" in single
    for text in (guided, iterative, single):
        assert "  " not in text and "{" not in text
    short = Instructions(Letters(), "single-step", 4).text(SOURCE)
    assert "sequence of 4 sentences" in short and f"\n4. {example[-1]}\n" in short and "\n5." not in short
    assert parse_list(numbered(example), 32) == example
    assert verify_chain([SOURCE, *example], 32) is None
    assert "1. The cat" in Instructions(Letters(), "single-step", 1).text(SOURCE)


def test_a_chat_template_is_used_where_there_is_one():
    instructions = Instructions(Chatting(), "guided", 2, "Say {sentence} again")
    assert read(instructions("hi {sentence} {x}")) == "<user>Say hi {sentence} {x} again</><assistant>"
    plain = Instructions(Chatting(), "guided", 2, "Say {sentence} again", chat=False)
    assert read(plain("hi")) == "\x01Say hi again"
    assert read(Instructions(Letters(), "guided", 2, "{sentence}\x03")("hi")) == "\x01hi"  # no end before the answer
    with pytest.raises(ValueError, match="no chat template"):
        Instructions(Letters(), "guided", 2, chat=True)
    with pytest.raises(ValueError, match="must contain the placeholder"):
        Instructions(Letters(), "guided", 2, "Say it again")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1. a\n2. b\n3. c", ["a", "b", "c"]),
        ("Here are three sentences:\n\n1) a\n\n2) b \n 3: c\n", ["a", "b", "c"]),
        ("1. a\n2. b", "wrong list length: 2 sentences instead of 3"),
        ("1. a\n3. c", "list out of order: item 3 follows item 1"),
        ("1. a\nI hope this helps!", "not a numbered list item: 'I hope this helps!'"),
        ("1. a\nand so on:\n2. b", "not a numbered list item: 'and so on:'"),
        ("", "wrong list length: 0 sentences instead of 3"),
        ("1. 2 dogs\n2. 3. c\n3. d", ["2 dogs", "3. c", "d"]),
    ],
)
def test_lists_are_parsed_whole_or_rejected(text, found):
    assert parse_list(text, 3) == found


# Rules


@pytest.mark.parametrize(
    ("sentence", "reason"),
    [
        ("", "empty"),
        ("One line\nand another", "more than one line"),
        ("... 123 !", "no letters"),
        ("Half a charact\ufffd", "an incomplete character"),
        ("a " * 130, "too long: 260 characters, but the source has 34"),
        ("a", "too short: 1 characters, but the source has 34"),
        ("I cannot fulfill your request.", "boilerplate: 'I cannot fulfill'"),
        ("I’m sorry, but I can’t help with that.", "boilerplate: 'I’m sorry, but'"),
        ("As an AI language model, I have no guitar.", "boilerplate: 'As an AI'"),
        ("Sure, here is a rewritten sentence: a man plays.", "boilerplate: 'Sure, here'"),
        ("Result: A man plays.", "boilerplate: 'Result:'"),
        ("A man plays.</s>", "boilerplate: '</s>'"),
    ],
)
def test_sentences_that_are_refused(sentence, reason):
    assert verify_sentence(sentence, SOURCE) == reason


@pytest.mark.parametrize(
    "sentence",
    [
        "Someone makes music.",
        "On the stage, a man can't stop playing; here is the audience he sings for.",
        "I am a guitarist, and here is my stage.",
        "舞台上有人在弹吉他。",
        "They said the assistant was sorry that I left.",
        "I am sorry for the man on the stage.",
        "a " * 118,
    ],
)
def test_sentences_that_are_kept(sentence):
    assert verify_sentence(sentence, SOURCE) is None


def test_rules_that_look_at_more_than_the_sentence():
    assert verify_sentence("A man plays", SOURCE, "length") == "not complete: cut off at max_new_tokens"
    assert verify_sentence("A man plays", SOURCE, "stop") is None
    assert verify_sentence("Sorry, but I left.", "I'm sorry, but we are closed.") is None  # its source says so, too
    assert verify_sentence("Sorry, but I left.", SOURCE) is not None
    assert verify_sentence("Go", "x" * 40) is None and verify_sentence("Go", "x" * 41) is not None  # a 20th
    chain = ["a", "b", "A.", "c"]
    assert verify_chain(chain, 3) is None
    assert verify_chain(chain, 4) == "not complete: 3 of 4 sentences"
    assert verify_chain(chain) is None
    assert verify_chain([*chain, ' "a"  '], 4) == "repeated: sentence 4 occurs for the 3rd time"
    assert verify_chain(["a b", "a  b", "c", "ab", "A B!"]) == "repeated: sentence 4 occurs for the 3rd time"


# Starts


def test_inputs_that_cannot_be_used_are_counted(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes("\n".join(["a man", "", "two dogs", " a man ", "12 .", "x" * 50, "  ", "more"]).encode())
    data = Sentences(input=str(path))
    kept, skipped = read_starts(data, lambda text: "too long" if len(text) > 20 else None)
    assert kept == [(1, "a man"), (3, "two dogs"), (8, "more")]
    assert skipped == {"empty": 2, "duplicate": 1, "no letters": 1, "too long": 1}
    assert read_starts(Sentences(input=str(path), max_rows=2), lambda _: None)[0] == kept[:2]
    with pytest.raises(ValueError, match=r"no usable sentences to start chains from: bad \(5\), empty \(3\)"):
        path.write_text("a\nb\n\n\n\nc\nd\ne\n")
        read_starts(data, lambda _: "bad")


@pytest.mark.parametrize("wrong", ["Sure, here is it", "New sentence: A man sings.", "A dog is sleeping on the beach."])
def test_sampled_sentence_that_breaks_a_rule_is_drawn_again(wrong):
    few, asked = Instructions(tiny_encoder().tokenizer, "iterative", 2, FEW_SHOT), {"method": "iterative", "steps": 2}
    for draws in (True, False):
        chain, seeds = Chain(7, ["A man plays a guitar."], few, Generation(**asked, do_sample=draws)), set()
        for _ in range(REDRAWS if draws else 0):
            seeds.add(chain.request(None).seed)
            chain.take(Answer([], wrong, "eos"))
            assert not chain.finished and len(chain.sentences) == 1
        assert len(seeds) == (REDRAWS if draws else 0)
        chain.take(Answer([], wrong, "eos"))
        assert chain.finished and chain.reason
    chain = Chain(7, ["A man plays a guitar."], few, Generation(**asked, do_sample=True))
    for text in (wrong, "A man plays a drum.", wrong, "A man plays chess."):
        chain.take(Answer([], text, "eos"))
    assert chain.finished and not chain.reason and chain.sentences[1:] == ["A man plays a drum.", "A man plays chess."]
