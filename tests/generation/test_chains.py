"""The job generate with a tiny language model: output, resuming and several processes."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raoe_train import run
from raoe_train.generation import Chain
from raoe_train.jobs import generate as job
from raoe_train.outputs import Output
from tests.decoders import saved_decoder
from tests.tiny import SENTENCES

STEPS = 4


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A saved language model with enough positions for prompts, whose answers differ by sentence."""
    name = saved_decoder(tmp_path_factory.mktemp("writer"))
    model = AutoModelForCausalLM.from_pretrained(name).double()
    model.config.max_position_embeddings = 1024
    model = type(model)(model.config).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.model_max_length = 1024
    model.save_pretrained(name)
    tokenizer.save_pretrained(name)
    return name


@pytest.fixture
def sentences(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{sentence}\n" for sentence in SENTENCES))
    return path


def options(writer, sentences, output, **more):
    return {
        "model.name": writer,
        "model.device": "cpu",
        "data.input": str(sentences),
        "output": str(output),
        "generation": {
            "steps": STEPS, "max_new_tokens": 8, "verify": False, "batch_size": 3, "prompt": "Again: {sentence} ->"
        },
        **more,
    }  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def plainly(writer, sentence, method="guided", guidance=1.5):
    """A chain by transformers' generate, step by step."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(writer), AutoTokenizer.from_pretrained(writer)

    def ids(text):
        return torch.tensor([tokenizer(f"Again: {text} ->")["input_ids"]])

    chain = [sentence]
    for step in range(STEPS):
        led = step and method == "guided"
        extra = {"guidance_scale": guidance, "negative_prompt_ids": ids(chain[-2])} if led else {}
        near = ids(chain[-1])
        result = model.generate(
            near, max_new_tokens=8, do_sample=False, stop_strings=["\n"], tokenizer=tokenizer, **extra
        )
        text = tokenizer.decode(result[0, near.shape[1] :], skip_special_tokens=True)
        chain.append(text.partition("\n")[0].strip())
    return chain


@pytest.mark.parametrize("method", ["guided", "iterative"])
def test_chains_equal_those_of_transformers(writer, sentences, tmp_path, method):
    output = tmp_path / "chains.jsonl"
    result = run("generate", **options(writer, sentences, output), **{"generation.method": method})
    results = lines(output)
    assert [line["id"] for line in results] == list(range(1, 12))
    for line, sentence in list(zip(results, SENTENCES, strict=True))[:4]:
        assert line["sentences"] == plainly(writer, sentence, method)
    for line in results:
        assert len(line["sentences"]) == STEPS + 1
        assert list(line) == ["id", "sentences", "method", "settings", "model", "versions"]
        assert (line["method"], line["model"]) == (method, writer)
        assert line["settings"]["guidance"] == (1.5 if method == "guided" else 1.0)
        assert line["settings"]["steps"] == STEPS and "transformers" in line["versions"]
    assert files(tmp_path) == ["chains.jsonl", "chains.jsonl.json", "in.txt"]
    assert result.items() <= json.loads((tmp_path / "chains.jsonl.json").read_text()).items()
    assert (result["chains"], result["sentences"], result["failed_chains"]) == (11, 55, {})
    assert result["run"]["tokens"] > 300 and result["run"]["tokens_per_second"] > 0


def test_output_does_not_depend_on_batch_size(writer, sentences, tmp_path):
    common = {"generation.do_sample": True, "generation.temperature": 1.3}
    for size in (1, 3, 50):
        output = tmp_path / f"{size}.jsonl"
        run("generate", **options(writer, sentences, output), **common, **{"generation.batch_size": size})
    texts = [(tmp_path / f"{size}.jsonl").read_text() for size in (1, 3, 50)]
    assert texts[0] == texts[1] == texts[2]
    run("generate", **options(writer, sentences, tmp_path / "o.jsonl"), **common, **{"generation.seed": 1})
    theirs, ours = lines(tmp_path / "o.jsonl"), lines(tmp_path / "1.jsonl")
    assert all(a["sentences"] != b["sentences"] for a, b in zip(ours, theirs, strict=True))
    assert ours[0]["settings"]["temperature"] == 1.3


def test_failed_chains_are_written_separately(writer, sentences, tmp_path, capsys):
    output = tmp_path / "chains.jsonl"
    result = run("generate", **options(writer, sentences, output), **{"generation.verify": True})
    failed = lines(tmp_path / "chains.jsonl.failed.jsonl")
    assert sum(result["failed_chains"].values()) == len(failed) > 0
    assert result["failed"] is (result["chains"] < 1.1)
    assert result["chains"] + len(failed) == 11
    for line in failed:
        assert line["reason"] and 1 <= line["step"] == len(line["sentences"]) - 1 <= STEPS
        assert line["sentences"][0] == SENTENCES[line["id"] - 1]
    assert "failed chains, saved in" in capsys.readouterr().out
    before = (output.read_bytes(), result)
    assert run("generate", **options(writer, sentences, output), **{"generation.verify": True}) == before[1]
    assert output.read_bytes() == before[0]


TRIED = {"prompt": "few-shot", "do_sample": True}


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "--generation.max_new_tokens 2 --generation.prompt few-shot --generation.do_sample"),
        ({"prompt": "few-shot"}, "--generation.max_new_tokens 2 --generation.do_sample"),
        (TRIED, "--generation.max_new_tokens 2"),
        ({**TRIED, "max_new_tokens": 64, "stop_strings": ["a"]}, "a larger model"),
    ],
)
def test_advice_is_not_what_is_already_set(writer, sentences, tmp_path, capsys, monkeypatch, settings, advice):
    """And the summary has the reason: at one token, every answer is cut off."""
    if "stop_strings" in settings:
        monkeypatch.setattr("raoe_train.generation.chains.verify_sentence", lambda *_: "no letters")
    made = options(writer, sentences, tmp_path / "chains.jsonl")
    made["generation"] |= {"verify": True, "max_new_tokens": 1, **settings}
    result = run("generate", **made)
    reason = "no letters" if "stop_strings" in settings else "not complete: cut off at max_new_tokens"
    printed = capsys.readouterr().out
    assert result["failed_chains"] == {reason: 11} and f"chains.jsonl.failed.jsonl: {reason} (11)\n" in printed
    assert f"few chains passed all checks: try {advice}\n" in printed


def test_resume_after_a_failure(writer, sentences, tmp_path, monkeypatch):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "chains.jsonl"
    run("generate", **options(writer, sentences, whole))
    real, asked = Chain.request, []

    def failing(chain, limit):
        asked.append((chain.key, len(chain.sentences)))
        if len(asked) == 32:
            raise RuntimeError("out of memory")
        return real(chain, limit)

    with monkeypatch.context() as patch:
        patch.setattr(Chain, "request", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            run("generate", **options(writer, sentences, output))
    (folder,) = tmp_path.glob("chains.jsonl.parts/*")
    (part,) = folder.glob("*.jsonl")
    kept = [row["id"] for row in lines(part)]
    assert 0 < len(kept) < 11 and not output.exists()
    part.write_bytes(part.read_bytes() + b'{"id": 11, "sentences": ["nobody re')  # as left by a kill
    asked.clear()
    monkeypatch.setattr(Chain, "request", lambda chain, limit: (
        asked.append((chain.key, len(chain.sentences))), real(chain, limit))[1])  # fmt: skip
    result = run("generate", **options(writer, sentences, output), **{"generation.batch_size": 2})
    assert dict(reversed(asked)) == {key: 1 for key in range(1, 12) if key not in kept}  # each chain's first request
    assert output.read_bytes() == whole.read_bytes()
    assert (result["chains"], result["run"]["chains"]) == (11, 11 - len(kept))
    assert files(tmp_path)[:2] == ["chains.jsonl", "chains.jsonl.json"] and "chains.jsonl.parts" not in files(tmp_path)
    asked.clear()
    run("generate", **options(writer, sentences, output))
    assert asked == []


@pytest.mark.parametrize(
    ("more", "stops"),
    [
        ({}, ["\n"]),  # or a plain text would go on with something else
        ({"generation.method": "single-step"}, [f"\n{STEPS + 1}."]),
        ({"generation.stop_strings": ["!", "?"]}, ["!", "?"]),
        ({"generation.stop_strings": []}, []),
        ({"generation.chat": True}, None),
    ],
    ids=str,
)
def test_where_answers_end(writer, sentences, tmp_path, monkeypatch, more, stops):
    seen, real, load = [], job.GuidedDecoder, job.load_tokenizer

    def spying(model, tokenizer, sampling, **options):
        seen.append(sampling.stop_strings)
        return real(model, tokenizer, sampling, **options)

    def chatting(config):
        tokenizer = load(config)
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
        return tokenizer

    monkeypatch.setattr(job, "GuidedDecoder", spying)
    if "generation.chat" in more:
        monkeypatch.setattr(job, "load_tokenizer", chatting)
    result = run("generate", **options(writer, sentences, tmp_path / "chains.jsonl"), **more)
    assert seen == [stops] and result["chains"] == 11
    for line in lines(tmp_path / "chains.jsonl"):
        assert not any(stop in text for stop in stops or [] for text in line["sentences"][1:])


def test_processes_share_the_work(writer, sentences, tmp_path, monkeypatch):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "chains.jsonl"
    run("generate", **options(writer, sentences, whole))
    monkeypatch.setenv("WORLD_SIZE", "3")
    asked, real = [], Chain.request
    monkeypatch.setattr(Chain, "request", lambda chain, limit: (asked.append(chain.key), real(chain, limit))[1])
    monkeypatch.setattr(Output, "wait", lambda output: {"waiting": True})
    for rank in (2, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert run("generate", **options(writer, sentences, output)) == {"waiting": True} and not output.exists()
        if rank == 2:
            assert set(asked) == {3, 6, 9}
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # a rerun may have fewer
    asked.clear()
    result = run("generate", **options(writer, sentences, output))
    assert set(asked) == {1, 4, 7, 10}
    assert result["chains"] == 11
    assert output.read_bytes() == whole.read_bytes()
    assert "chains.jsonl.parts" not in files(tmp_path)
    assert run("generate", **options(writer, sentences, output)) == result


# Settings


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"generation.top_p": 0.5}, "no effect on greedy decoding"),
        ({"generation.method": "single-step", "generation.prompt": "few-shot"}, "'few-shot' does not work with"),
        ({"output": "chains.json"}, r"must name a \.jsonl file"),
        ({"model.name": ""}, r"model\.name is missing"),
    ],
)
def test_invalid_settings_are_reported_before_writing(writer, sentences, tmp_path, more, message):
    before = files(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run("generate", **{**options(writer, sentences, tmp_path / "chains.jsonl"), **more})
    assert files(tmp_path) == before
