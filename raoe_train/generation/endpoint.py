"""A language model that is served elsewhere: answers from an endpoint of OpenAI's protocol, many asked at once.

It stands where a GuidedDecoder stands in `grow`. What is asked is text, and the server makes tokens of it: with a chat
template (of its own) by POST /chat/completions as one user's message, without one by POST /completions. So a server
that has the same model reads the same tokens as we do here.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from raoe_train.generation.sampling import FIELDS, Sampling
from raoe_train.generation.slots import Request

URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/[\w.~%/-]*)?", re.ASCII)
TRIES = 6  # of a request: a server may be starting, or may have too much to do
LONGEST_WAIT = 60.0  # seconds between two of them
TIMEOUT = 600.0  # seconds without a byte
LARGEST = 1 << 24  # bytes of an answer
REFUSED = (400, 413, 422)  # of one prompt, where others are answered
PASSED = ("do_sample", "temperature", "top_p", "stop_strings")  # of Sampling; others are no part of the protocol


@dataclass(frozen=True)
class Reply:
    """What was answered, as grow's chains read it of an Answer."""

    text: str
    finish: str  # "stop", "length", or the server's word for why it ended otherwise
    tokens: int = 0  # as the server counts them
    context: None = None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key is for the host that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Endpoint:
    """Asks a served model; each request in a thread of its own.

    Args:
        url: of the API, up to where /chat/completions follows: http://localhost:8000/v1.
        model: its name there.
        sampling: do_sample, temperature, top_p and stop_strings are handed on, greedy decoding as temperature 0.
        chat: by /chat/completions, else by /completions.
        key: environment variable that holds the key, where there is one; it goes nowhere but to the server.
        wait: seconds before a request is made again, twice as many before each further time; Retry-After may say more.

    Raises:
        ValueError: a URL that cannot be, or sampling that the protocol has no word for. Of `step`: an answer that is
            none of the protocol, or that every prompt is refused.
        OSError: of `step`: a server that is not there, does not want us, or is busy TRIES times.
    """

    limit: int | None = None  # of positions: the server refuses what is too long
    can_join = True

    def __init__(
        self, url: str, model: str, sampling: Sampling, *, chat: bool = True, key: str = "", wait: float = 1.0
    ) -> None:
        if not URL.fullmatch(url):
            hint = " (generation.key names the variable of a key)" if "@" in url or "?" in url else ""
            shown = "" if hint else f", got {url!r}"  # it may have a key in it
            raise ValueError(f"generation.endpoint must be a URL such as http://localhost:8000/v1{hint}{shown}")
        for name in FIELDS:
            if name not in PASSED and getattr(sampling, name) is not None:
                raise ValueError(f"generation.{name} cannot be asked of an endpoint, but {', '.join(PASSED)} can")
        self.url = url.rstrip("/") + ("/chat/completions" if chat else "/completions")
        self.model, self.sampling, self.chat, self.wait = model, sampling, chat, wait
        self.active = 0  # requests under way
        self._key = os.environ.get(key, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # whose error would show it
            raise ValueError(f"the variable {key} (generation.key) holds what can be no key: more than printable ASCII")
        self._done: queue.SimpleQueue[tuple[Hashable, Reply | Exception]] = queue.SimpleQueue()
        self._refused: list[tuple[Hashable, Reply]] = []  # until one is answered: it may be that all will be
        self._answered = self._over = False
        self._opener = urllib.request.build_opener(_NoRedirects)

    def add(self, requests: Iterable[tuple[Hashable, Request]]) -> list[tuple[Hashable, Reply]]:
        """Begin (key, request) pairs."""
        for key, request in requests:
            self.active += 1
            threading.Thread(target=self._work, args=(key, request), daemon=True).start()
        return []

    def step(self) -> list[tuple[Hashable, Reply]]:
        """Wait for an answer; the pairs (key, reply) of all that are there."""
        found: list[tuple[Hashable, Reply]] = []
        while self.active and (not found or not self._done.empty()):
            key, reply = self._done.get()
            self.active -= 1
            if isinstance(reply, Exception):
                self._over = True
                raise reply
            refused = reply.finish.startswith("refused")
            self._answered = self._answered or not refused
            (self._refused if refused else found).append((key, reply))
        if self._answered:
            found, self._refused = found + self._refused, []
        elif self._refused:
            raise ValueError(f"{self.url} answers none of {len(self._refused)} prompts: {self._refused[0][1].finish}")
        return found

    def body(self, request: Request) -> dict[str, Any]:
        """What is posted."""
        text, sampling = request.near, self.sampling
        wish: dict[str, Any] = {"model": self.model, "max_tokens": request.max_new_tokens}
        wish |= {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
        wish["temperature"] = (1.0 if sampling.temperature is None else sampling.temperature) * sampling.do_sample
        if sampling.do_sample:
            wish["seed"] = request.seed % (1 << 31)  # as many bits as every server takes
        if sampling.top_p is not None:
            wish["top_p"] = sampling.top_p
        return wish | ({"stop": sampling.stop_strings} if sampling.stop_strings else {})

    def _work(self, key: Hashable, request: Request) -> None:
        try:
            self._done.put((key, self._ask(json.dumps(self.body(request)).encode())))
        except Exception as error:
            self._done.put((key, error))

    def _ask(self, body: bytes) -> Reply:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        wait = self.wait
        for left in reversed(range(TRIES)):
            asked = urllib.request.Request(self.url, body, headers)
            said = 0.0
            try:
                with self._opener.open(asked, timeout=TIMEOUT) as response:
                    return self._read(response.read(LARGEST))
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code} {self._said(error)}"
                if error.code in REFUSED:
                    return Reply("", f"refused: {problem}")
                if error.code != 429 and error.code < 500:
                    hint = "; is the URL the one that ends before /chat/completions?" if error.code == 404 else ""
                    raise OSError(f"{self.url} answers {problem}{hint}") from None
                after = error.headers.get("Retry-After", "")
                said = float(after) if after.isdecimal() else 0.0  # it may be a date
            except (OSError, http.client.HTTPException) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            if not left or self._over:
                break
            time.sleep(min(max(wait, said), LONGEST_WAIT))
            wait *= 2
        raise OSError(f"{self.url} did not answer in {TRIES} tries; the last time: {problem}")

    def _read(self, body: bytes) -> Reply:
        try:
            answer: Any = json.loads(body)
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
            text = "" if text is None else text + ""
            finish, used = choice.get("finish_reason"), answer.get("usage")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            kind = "chat completion" if self.chat else "completion"
            raise ValueError(f"{self.url} answers what is no {kind}: {self._shown(body)!r}") from None
        tokens = used.get("completion_tokens") if isinstance(used, dict) else None
        # half of a surrogate pair, which JSON can hold and a file cannot
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return Reply(text, self._shown(str(finish).encode(errors="replace")), tokens if type(tokens) is int else 0)

    def _said(self, error: urllib.error.HTTPError) -> str:
        """What an error's body says, in a line."""
        try:
            body = error.read(LARGEST)
            said = json.loads(body)["error"]["message"].encode(errors="replace")
        except (OSError, http.client.HTTPException):
            return ""
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            said = body
        return self._shown(said)

    def _shown(self, said: bytes) -> str:
        line = " ".join(said.decode(errors="replace").split())
        return (line.replace(self._key, "…") if self._key else line)[:200]
