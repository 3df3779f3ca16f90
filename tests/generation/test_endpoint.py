"""Chains by a served model: a server of OpenAI's protocol in a thread, and what may come back from one."""

from __future__ import annotations

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from raoe_train import run
from raoe_train.generation import Instructions, Request, Sampling, endpoint
from tests.generation.test_chains import files, lines
from tests.tiny import SENTENCES

STEPS = 3
KEY = "sk-not-to-be-seen"


def wrapped(text, chat, finish="stop", **more):
    """An answer of the protocol."""
    choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"choices": [{"index": 0, **choice, "finish_reason": finish}], "usage": {"completion_tokens": 7}, **more}


class Server(ThreadingHTTPServer):
    """Answers what `answer(path, body)` gives: an object, or (status, headers, bytes)."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.headers, self.lock = [], [], threading.Lock()
        self.together = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.answer = lambda path, body: wrapped(told(body) + " so", "chat" in path)


def told(body):
    return body["messages"][0]["content"] if "messages" in body else body["prompt"]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append((self.path, body))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.together += 1
            server.most = max(server.most, server.together)
            found = server.answer(self.path, body)
        status, headers, data = found if isinstance(found, tuple) else (200, {}, json.dumps(found).encode())
        with server.lock:
            server.together -= 1
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    waits.clear()


waits: list[float] = []


@pytest.fixture
def ask(server, tmp_path):
    """The job over SENTENCES, or others."""
    (tmp_path / "in.txt").write_text("".join(f"{sentence}\n" for sentence in SENTENCES))

    def call(output="chains.jsonl", **more):
        wish = {"method": "iterative", "steps": STEPS, "max_new_tokens": 8, "prompt": "{sentence}"}
        wish["endpoint"] = server.url
        given = {"model.name": "far-70b", "data.input": str(tmp_path / "in.txt"), "output": str(tmp_path / output)}
        return run("generate", **{**given, "generation": {**wish, **more.pop("generation", {})}, **more})

    return call


def test_each_step_asks_about_the_sentence_before(server, ask, tmp_path):
    replies = {}

    def answer(path, body):
        return wrapped(replies.setdefault(told(body), f"The {len(replies)}th sentence."), True)

    server.answer = answer
    assert ask(generation={"prompt": None})["chains"] == 11
    prompt = Instructions(None, "iterative", STEPS).text  # Appendix A's, in no template
    for line in lines(tmp_path / "chains.jsonl"):
        for before, after in itertools.pairwise(line["sentences"]):
            assert replies[prompt(before)] == after
    assert len(server.asked) == 11 * STEPS
    for path, body in server.asked:
        said = {"model": "far-70b", "max_tokens": 8, "temperature": 0.0}
        assert path == "/v1/chat/completions"
        assert body == {**said, "messages": [{"role": "user", "content": told(body)}]}


def test_going_on_asks_nothing_that_is_finished(server, ask, tmp_path):
    whole = ask("whole.jsonl")
    assert (whole["chains"], whole["sentences"], whole["run"]["tokens"]) == (11, 44, 11 * STEPS * 7)
    for line, sentence in zip(lines(tmp_path / "whole.jsonl"), SENTENCES, strict=True):
        assert line["sentences"] == [sentence + " so" * step for step in range(STEPS + 1)]
        assert (line["model"], line["settings"]["endpoint"]) == ("far-70b", "chat completions")
    good, left = server.answer, [13]

    def breaks(path, body):
        left[0] -= 1
        return good(path, body) if left[0] >= 0 else (403, {}, b"the week's budget is spent")

    server.answer = breaks
    with pytest.raises(OSError, match="/v1 answers HTTP 403 the week's budget is spent"):
        ask(generation={"batch_size": 2})
    kept = lines(*tmp_path.glob("chains.jsonl.parts/*/rank-*.jsonl"))
    assert 0 < len(kept) < 11
    server.answer, server.asked[:] = good, []
    ask()
    done = {line["sentences"][0] for line in kept}
    assert {told(body).replace(" so", "") for _, body in server.asked} == set(SENTENCES) - done
    assert (tmp_path / "chains.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    server.asked[:] = []
    ask()
    assert server.asked == []
    with pytest.raises(ValueError, match="is of other settings or inputs"):
        ask(generation={"chat": False})


def test_several_are_asked_at_once_and_no_more(server, ask):
    gate = threading.Barrier(3)
    real = server.answer

    def together(path, body):
        if told(body) in SENTENCES[:3]:
            server.lock.release()
            gate.wait(10)  # breaks unless three are here
            server.lock.acquire()
        return real(path, body)

    server.answer = together
    assert ask(generation={"batch_size": 3})["chains"] == 11
    assert server.most <= 3


def test_the_same_text_with_and_without_a_chat_template(server, ask):
    """Without one it is a plain completion, which ends with its line, as here."""
    ask(generation={"chat": False, "prompt": "Again: {sentence} ->", "steps": 1, "batch_size": 1})
    path, body = server.asked[0]
    assert path == "/v1/completions"
    said = {"model": "far-70b", "max_tokens": 8, "temperature": 0.0, "stop": ["\n"]}
    assert body == {**said, "prompt": f"Again: {SENTENCES[0]} ->"}


def test_sampling_is_handed_on_with_a_seed_for_each_step(server, ask):
    wish = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "stop_strings": ["\n"]}
    ask("a.jsonl", generation=wish)
    first, server.asked[:] = {told(body): body for _, body in server.asked}, []
    assert {body["seed"] for body in first.values()}.__len__() == 11 * STEPS
    body = first[SENTENCES[0]]
    assert (body["temperature"], body["top_p"], body["stop"]) == (0.7, 0.9, ["\n"])
    assert all(0 <= body["seed"] < 1 << 31 for body in first.values())
    ask("b.jsonl", generation=wish)
    assert {told(body): body for _, body in server.asked} == first


def test_nobody_is_there(server, ask):
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError, match=r"/v1 did not answer in 6 tries; the last time: .*refused"):
        ask(generation={"batch_size": 1})


@pytest.mark.parametrize(
    "data",
    [b"", b"<html>", b"[]", b'"text"', b"null", b'{"choices": []}', b'{"choices": [{}]}', b'{"choices": {"0": 1}}',
     b'{"choices": [{"message": "hello"}]}', b'{"choices": [{"message": {"content": ["a"]}}]}', b"[" * 100_000,
     b'{"object": "error"}', b'{"choices": [{"message": {"content": 3}}]}'],
)  # fmt: skip
def test_what_is_no_answer(server, data):
    server.answer = lambda path, body: (200, {}, data)
    there = endpoint.Endpoint(server.url, "far-70b", Sampling())
    there.add([(1, Request("a man", max_new_tokens=8))])
    with pytest.raises(ValueError, match="/v1 answers what is no chat completion: "):
        there.step()


def test_what_comes_back_is_data(server, ask, tmp_path):
    """Odd answers fail their own chain, and no other."""
    odd = {
        SENTENCES[0]: wrapped(None, True),
        SENTENCES[1]: wrapped("half", True, "length"),
        SENTENCES[2]: wrapped("hm", True, "content_filter"),
        SENTENCES[3]: wrapped("a \ud800 half", True),
        SENTENCES[4]: wrapped("fine", True, None),
        SENTENCES[5]: wrapped("fine\nbut two", True),
        SENTENCES[6]: (400, {}, b'{"error": {"message": "the prompt is too long"}}'),
        SENTENCES[7]: wrapped("It was fine.", True, usage={"completion_tokens": "many"}),
        SENTENCES[8]: wrapped("It was fine.", True, usage=[]),
    }
    real = server.answer
    server.answer = lambda path, body: odd.get(told(body)) or real(path, body)
    result = ask(generation={"batch_size": 50})
    reasons = {line["id"]: line["reason"] for line in lines(tmp_path / "chains.jsonl.failed.jsonl")}
    assert reasons == {
        1: "empty",
        2: "not complete: cut off at max_new_tokens",
        3: "not complete: content_filter",
        4: "half a character",
        5: "not complete: None",
        6: "more than one line",
        7: 'not complete: refused: HTTP 400 {"error": {"message": "the prompt is too long"}}',
    }
    assert result["chains"] == 4


def test_a_prompt_that_no_server_takes_ends_the_job(server, ask, tmp_path):
    server.answer = lambda path, body: (400, {}, b'{"error": {"message": "max_tokens is not supported"}}')
    with pytest.raises(ValueError, match=r"answers none of 11 prompts: refused: HTTP 400 .*max_tokens is not"):
        ask()
    assert not (tmp_path / "chains.jsonl").exists()


@pytest.mark.parametrize("status", [302, 307])
def test_the_key_goes_to_the_server_and_nowhere_else(server, ask, tmp_path, monkeypatch, capsys, status):
    monkeypatch.setenv("THEIRS", f"{KEY}\n")
    ask(generation={"key": "THEIRS"})
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    for path in tmp_path.iterdir():
        assert KEY not in path.read_text()
    with Server() as other:  # to which we are sent
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        server.answer = lambda path, body: (status, {"Location": other.url}, f"your key {KEY} is".encode())
        with pytest.raises(OSError, match=f"HTTP {status} your key … is$"):
            ask("b.jsonl", generation={"key": "THEIRS", "batch_size": 1})
        assert other.asked == []
        other.shutdown()
    server.headers.clear()
    server.answer = lambda path, body: wrapped(told(body) + " so", True)
    ask("c.jsonl")
    assert len(server.headers) == 33 and KEY not in str(server.headers)
    monkeypatch.setenv("THEIRS", f"{KEY}\nX-Other: 1")
    with pytest.raises(ValueError, match=r"THEIRS \(generation.key\) holds no key") as error:
        ask("d.jsonl", generation={"key": "THEIRS"})
    assert KEY not in str(error.value) + "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"generation": {"method": "guided"}}, "generation.method guided mixes log-probabilities of all tokens"),
        ({"model.name": ""}, "model.name is missing: the language model, as the endpoint calls it"),
        ({"model.load_in_4bit": True}, "model.load_in_4bit has no effect on a model that generation.endpoint has"),
        ({"generation": {"do_sample": True, "top_k": 5}}, "generation.top_k cannot be asked of an endpoint"),
        ({"generation": {"endpoint": "localhost:8000"}}, "must be a URL such as"),
        ({"generation": {"endpoint": "http://h:80x/v1"}}, "must be a URL such as"),
        ({"generation": {"endpoint": "http://h:99999/v1"}}, "must be a URL such as"),
        ({"generation": {"endpoint": "file:///etc/passwd"}}, "must be a URL such as"),
        ({"generation": {"endpoint": f"https://u:{KEY}@h/v1"}}, "must be a URL such as"),
        ({"generation": {"endpoint": f"https://h/v1?key={KEY}"}}, "must be a URL such as"),
    ],
    ids=str,
)
def test_what_cannot_be(server, ask, more, problem):
    with pytest.raises(ValueError, match=problem) as error:
        ask(**more)
    assert KEY not in str(error.value) and server.asked == []


def test_which_sentences_are_asked_about(server, ask, tmp_path):
    """There is no tokenizer: words are counted, and what looks like a special token is one."""
    texts = ["a man <|im_end|>", "[/INST] a man", "</s> a man", "<start_of_turn> a", "a b c d e f", "a <b> [X] man"]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in texts))
    result = ask(generation={"max_input_tokens": 5})
    assert result["skipped"] == {"special token": 4, "too long": 1}
    assert [line["id"] for line in lines(tmp_path / "chains.jsonl")] == [6]
    assert files(tmp_path) == ["chains.jsonl", "chains.jsonl.json", "in.txt"]
