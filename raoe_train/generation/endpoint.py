"""A language model that is served elsewhere: answers from an endpoint of OpenAI's protocol, many asked at once.

It stands where a GuidedDecoder stands in `grow`. Text is asked, with the server's chat template by /chat/completions as
one user's message, without one by /completions: a server with the same model reads the same tokens as we do here.
"""

import os
import queue
import re
import threading
from collections.abc import Hashable, Iterable
from dataclasses import fields
from typing import Any

from raoe_train.generation.decoding import Answer, Request, Sampling

URL = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:\d+)?(/[\w.~%/-]*)?", re.ASCII)
TRIES = 6  # of a request: a server may be starting, or may have too much to do
TIMEOUT = 600.0  # seconds of a request
REFUSED = (400, 413, 422)  # of one prompt, where others are answered
PASSED = ("do_sample", "temperature", "top_p", "stop_strings")  # of Sampling; others are no part of the protocol


class Endpoint:
    """Asks a served model; each request in a thread of its own.

    Args:
        url: of the API, up to where /chat/completions follows: http://localhost:8000/v1.
        model: its name there.
        sampling: PASSED are passed on, greedy decoding as temperature 0.
        chat: by /chat/completions, else by /completions.
        key: environment variable of the key, which goes to that URL alone: no proxy, no redirect.
    """

    limit: int | None = None  # of positions: the server refuses what is too long
    can_join = True

    def __init__(self, url: str, model: str, sampling: Sampling, *, chat: bool = True, key: str = "") -> None:
        import openai

        if not (parts := URL.fullmatch(url)) or int((parts[2] or ":0")[1:]) > 65535:
            # it is not shown: there may be a key in it
            raise ValueError(
                "generation.endpoint must be a URL such as http://localhost:8000/v1; a key's variable is generation.key"
            )
        for each in fields(Sampling):
            if each.name not in PASSED and getattr(sampling, each.name) is not None:
                raise ValueError(f"generation.{each.name} cannot be asked of an endpoint, but {', '.join(PASSED)} can")
        self.url, self.model, self.sampling, self.chat = url.rstrip("/"), model, sampling, chat
        self.active = 0  # requests under way
        self._key = os.environ.get(key, "").strip()
        if key not in ("", "OPENAI_API_KEY") and not self._key:  # it is not shown: it may be the key
            raise ValueError("generation.key must be the name of an environment variable that holds the key")
        if not (self._key.isascii() and self._key.isprintable()):  # whose error would show it
            raise ValueError(f"the variable {key} (generation.key) holds no key: more than printable ASCII")
        self._done: queue.SimpleQueue[tuple[Hashable, Answer | Exception]] = queue.SimpleQueue()
        self._refused: list[tuple[Hashable, Answer]] = []  # until one is answered: it may be that all will be
        self._answered = False
        self._client = openai.OpenAI(
            base_url=self.url, api_key=self._key or "none", timeout=TIMEOUT, max_retries=TRIES - 1,
            http_client=openai.DefaultHttpxClient(trust_env=False, follow_redirects=False),
        )  # fmt: skip

    def add(self, requests: Iterable[tuple[Hashable, Request]]) -> list[tuple[Hashable, Answer]]:
        """Begin (key, request) pairs."""
        for key, request in requests:
            self.active += 1
            threading.Thread(target=self._work, args=(key, request), daemon=True).start()
        return []

    def step(self) -> list[tuple[Hashable, Answer]]:
        """Wait for an answer; the pairs (key, reply) of all that are there. OSError for a server that is not there, or
        does not accept the key; ValueError where it refuses every prompt."""
        found: list[tuple[Hashable, Answer]] = []
        while self.active and (not found or not self._done.empty()):
            key, reply = self._done.get()
            self.active -= 1
            if isinstance(reply, Exception):
                raise reply
            refused = reply.finish.startswith("refused")
            self._answered = self._answered or not refused
            (self._refused if refused else found).append((key, reply))
        if self._answered:
            found, self._refused = found + self._refused, []
        elif self._refused:
            raise ValueError(f"{self.url} answers none of {len(self._refused)} prompts: {self._refused[0][1].finish}")
        return found

    def _wish(self, request: Request) -> dict[str, Any]:
        text, sampling = request.near, self.sampling
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        wish = {
            **({"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}),
            "model": self.model,
            "max_tokens": request.max_new_tokens,
            "temperature": temperature * sampling.do_sample,
            "seed": request.seed % (1 << 31) if sampling.do_sample else None,  # as many bits as every server takes
            "top_p": sampling.top_p,
            "stop": sampling.stop_strings or None,
        }
        return {key: value for key, value in wish.items() if value is not None}

    def _work(self, key: Hashable, request: Request) -> None:
        try:
            self._done.put((key, self._ask(request)))
        except Exception as error:
            self._done.put((key, error))

    def _ask(self, request: Request) -> Answer:
        import openai

        client = self._client.chat.completions if self.chat else self._client.completions
        answer: Any = None
        try:
            answer = client.create(**self._wish(request))
            choice = answer.choices[0]
            text, finish = ((choice.message.content if self.chat else choice.text) or "") + "", choice.finish_reason
        except openai.APIStatusError as error:
            problem = f"HTTP {error.status_code} {self._shown(error.response.text)}"
            if error.status_code in REFUSED:
                return Answer([], "", f"refused: {problem}")
            raise OSError(f"{self.url} answers {problem}") from None
        except openai.APIConnectionError as error:
            cause = self._shown(str(error.__cause__ or error))
            raise OSError(f"{self.url} did not answer in {TRIES} tries; the last time: {cause}") from None
        except (openai.APIError, ValueError, LookupError, TypeError, AttributeError) as error:
            kind = "chat completion" if self.chat else "completion"
            raise ValueError(f"{self.url} answers what is no {kind}: {self._shown(f'{answer or error}')!r}") from None
        tokens = getattr(getattr(answer, "usage", None), "completion_tokens", 0)
        # a lone surrogate, which JSON can hold and a file cannot
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = text.replace(self._key, "…") if len(self._key) > 7 else text  # a shorter one may be a word
        return Answer([], text, self._shown(str(finish)), tokens=tokens if type(tokens) is int else 0)

    def _shown(self, said: str) -> str:
        """A line of what the server says, without the key."""
        line = " ".join(said.encode(errors="replace").decode().split())
        return (line.replace(self._key, "…") if self._key else line)[:200]
