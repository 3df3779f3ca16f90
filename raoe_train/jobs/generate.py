"""The job `generate`: every sentence grows a chain, many of them at once.

Three methods (the ranking-sentences paper's Appendix A): `guided`, in which each sentence answers the one before it,
led away from the one before that (Eq. 3 and 4); `iterative`, the same without guidance; `single-step`, one prompt for
the whole list.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from raoe_train.artifacts.ledger import Ledger
from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, identity, versions
from raoe_train.generation.instructions import METHODS, Prompts, parse_list
from raoe_train.generation.models import load_language_model, load_tokenizer
from raoe_train.generation.rules import verify_chain, verify_sentence
from raoe_train.generation.sampling import FIELDS, Sampling
from raoe_train.generation.starts import Sentences, read_inputs

if TYPE_CHECKING:
    from raoe_train.config import GenerateConfig, GenerationSection
    from raoe_train.generation.decoding import Answer, Context, GuidedDecoder, Request


def generate(config: GenerateConfig) -> dict[str, Any]:
    """Write chains of sentences for the sentences of data.input, one JSON line each.

    OUTPUT has {"id", "sentences": [source, x1 ... xn], "method", "settings", "model", "versions"} a line; `id` is the
    number of the source's row in the input, from 1. A chain that breaks a rule (see raoe_train.generation.rules) is
    given up there and goes to OUTPUT.failed.jsonl, with "reason" and "step"; with generation.verify false it goes on
    and is kept. How files grow, and what a rerun does, is said in raoe_train.artifacts.ledger. Under torchrun or
    accelerate each process writes its share.

    Returns:
        {"output", "chains", "sentences", "failed_chains": {reason: chains}, "skipped": {reason: rows}, "model",
        "settings", "versions", "run": {"chains", "tokens", "seconds", "tokens_per_second", "mix"} of this run and
        process}; also in OUTPUT.json. "waiting": True where other processes have chains to finish.

    Raises:
        ValueError: a setting that cannot be, a row that is no text, or another job's output in the way.
        FileNotFoundError: no such input or model.
    """
    ledger = Ledger(_checked_output(config), *rank_and_world())
    check(config.generation)
    sampling = Sampling.of(config.generation.decoding, list(asdict(config.generation)))
    tokenizer = load_tokenizer(config.model)
    prompts = Prompts(
        tokenizer,
        config.generation.method,
        config.generation.steps,
        config.generation.prompt,
        config.generation.chat,
    )
    sentences, skipped = read_inputs(config.data, _acceptable(tokenizer, config.generation.max_input_tokens))
    settings: dict[str, Any] = {
        "model": identity(config.model),
        "generation": effective(config.generation),
        "prompt": digest([prompts.template, prompts.chat]),
        "input": digest(sentences),
        "seeds": {**asdict(config.seeds), "batch_size": None, "device": None} if config.seeds.encoder else None,
    }
    with ledger.locked():
        found = ledger.claim(settings, config.overwrite)
        if found is not None and "chains" in found:
            print(f"{ledger.output} is there already, from the same model and sentences")
            return found
        if found is None:
            # what the clusters chose is kept: another number of threads may choose otherwise
            found = {"settings": settings, "selected": _selected(config, sentences)}
            ledger.begin(found)
    if found["selected"] is not None:
        kept = set(found["selected"])
        sentences = [(key, sentence) for key, sentence in sentences if key in kept]

    line = {
        "method": config.generation.method,
        "settings": {**settings["generation"], "prompt": settings["prompt"], "revision": config.model.revision},
        "model": config.model.name,
        "versions": versions(),
    }
    with ledger.writing():
        done = ledger.done()
        waiting = [item for item in ledger.share(sentences) if item[0] not in done]
        run = _write_chains(config, sampling, prompts, waiting, len(sentences), ledger, line) if waiting else {}
    with ledger.locked():
        found = ledger.claim(settings, False) or found
        if "chains" in found:  # another process has ended since
            return found
        brief = ledger.finish([key for key, _ in sentences])
        if brief is None:
            print(f"{len(waiting)} chains are done; other processes have some to finish")
            return {"output": str(ledger.output), "waiting": True, "run": run}
        good, bad = brief["chains"], brief["failed"]
        result = {
            "output": str(ledger.output),
            "chains": len(good),
            "sentences": sum(chain["length"] for chain in good),
            "failed_chains": dict(Counter(chain["reason"].partition(":")[0] for chain in bad).most_common()),
            "skipped": skipped,
            "model": config.model.name,
            "versions": versions(),
            "run": run,
            "settings": settings,
        }
        ledger.conclude(result)
    _print(result, sum(result["failed_chains"].values()))
    return result


def check(generation: GenerationSection) -> None:
    """ValueError for a setting that cannot be."""
    if generation.method not in METHODS:
        raise ValueError(f"generation.method must be one of {', '.join(METHODS)}, got {generation.method!r}")
    for name in ("steps", "max_new_tokens", "batch_size", "max_input_tokens"):
        if getattr(generation, name) < 1:
            raise ValueError(f"generation.{name} must be at least 1, got {getattr(generation, name)}")
    if not 0 <= generation.guidance < float("inf"):
        raise ValueError(f"generation.guidance must be finite and not negative, got {generation.guidance}")
    if clash := [name for name in generation.decoding if name in asdict(generation)]:
        raise ValueError(f"generation.decoding.{clash[0]}: say generation.{clash[0]}")


def effective(generation: GenerationSection) -> dict[str, Any]:
    """The settings that have a part in what is written, as plain values."""
    values = asdict(generation)
    for name in ("batch_size", "compile", "prompt", "chat", "max_input_tokens", "decoding"):
        del values[name]
    decoding = {name: value for name, value in generation.decoding.items() if value is not None and name in FIELDS}
    guidance = {"guidance": generation.guidance if generation.method == "guided" else 1.0}
    return {**values, **guidance, **dict(sorted(decoding.items()))}


@dataclass
class Chain:
    """One sentence's chain while it grows.

    Attributes:
        key: its id.
        sentences: the source and what has been written so far.
        reason: why it failed, or None.
        context: what its last answer was an answer to, as the decoder has it, until the chain is finished; at first
            another chain's, or None.
    """

    key: int
    sentences: list[str]
    prompts: Prompts
    generation: GenerationSection
    reason: str | None = None
    context: Context | None = None
    finished: bool = field(default=False, init=False)

    def request(self, limit: int | None) -> Request | None:
        """What to ask next; None where the model's `limit` of positions leaves no room, and then it has failed."""
        from raoe_train.generation.decoding import Request

        wish, step = self.generation, len(self.sentences)
        single = wish.method == "single-step"
        guidance = wish.guidance if wish.method == "guided" and step > 1 else 1.0  # lambda = 0 at first
        near = self.prompts(self.sentences[-1])
        far = self.prompts(self.sentences[-2]) if guidance != 1 else None
        new = wish.max_new_tokens * (wish.steps if single else 1)
        if limit is not None and max(len(near), len(far or ())) + new > limit:
            self._fail(f"no room: a prompt of {len(near)} and {new} new tokens, the model has {limit} positions")
            return None
        seed = int(digest([wish.seed, self.key, step])[:15], 16)
        return Request(near, far, guidance, new, seed, not single and step < wish.steps, self.context)

    def take(self, answer: Answer) -> None:
        """Go on with an answer; afterwards it may be finished, or have failed."""
        wish, text = self.generation, answer.text.strip()
        if wish.method == "single-step":
            self._take_list(text, answer.finish)
        else:
            self.sentences.append(text)
            if wish.verify and (reason := verify_sentence(text, self.sentences[0], answer.finish)):
                self._fail(reason)
        self.finished = self.finished or wish.method == "single-step" or len(self.sentences) > wish.steps
        if wish.verify and self.reason is None:
            if reason := verify_chain(self.sentences, wish.steps if self.finished else None):
                self._fail(reason)
        self.context = None if self.finished else answer.context

    def _take_list(self, text: str, finish: str) -> None:
        steps, verify = self.generation.steps, self.generation.verify
        found = "not complete: cut off at max_new_tokens" if finish == "length" else parse_list(text, steps)
        if isinstance(found, str):
            # what there is, for those who want to see it
            self.sentences += [line for line in map(str.strip, text.splitlines()) if line]
            if verify:
                self._fail(found)
            return
        for sentence in found:
            self.sentences.append(sentence)
            if verify and (reason := verify_sentence(sentence, self.sentences[0])):
                self._fail(reason)
                return

    def _fail(self, reason: str) -> None:
        self.reason, self.finished = reason, True


def grow(
    chains: Iterator[Chain], decoder: GuidedDecoder, slots: int, progress: Callable[[int], None] | None = None
) -> Iterator[Chain]:
    """Finished chains, as they finish, `slots` of them in flight.

    A chain's next step, or the next chain, joins those under way as soon as a quarter of them wait to, where the
    decoder lets requests join others; else all wait for the last.

    Args:
        chains: from which new ones are taken.
        progress: told the tokens of each answer.
    """
    flying: dict[int, Chain] = {}
    ready: list[Chain] = []
    latest: Context | None = None
    more = True
    while more or flying:
        while more and len(flying) < slots:
            chain = next(chains, None)
            if chain is None:
                more = False
            else:
                # its prompt begins with the same instruction as another chain's
                chain.context = latest
                flying[chain.key] = chain
                ready.append(chain)
        answers: list[Any] = []
        if ready and (not decoder.active or (decoder.can_join and 4 * len(ready) >= len(flying))):
            requests = [(chain, chain.request(decoder.limit)) for chain in ready]
            ready = []
            answers += decoder.add((chain.key, request) for chain, request in requests if request is not None)
            for chain, request in requests:
                if request is None:
                    yield flying.pop(chain.key)
        answers += decoder.step()
        for key, answer in answers:
            chain = flying[key]
            chain.take(answer)
            latest = chain.context or latest
            if progress is not None:
                progress(len(answer.ids))
            if chain.finished:
                yield flying.pop(key)
            else:
                ready.append(chain)


def _write_chains(
    config: GenerateConfig,
    sampling: Sampling,
    prompts: Prompts,
    waiting: Sentences,
    total: int,
    ledger: Ledger,
    line: dict[str, Any],
) -> dict[str, Any]:
    """Grow and write the chains of `waiting`; how many, and how fast."""
    from raoe_train.generation.decoding import GuidedDecoder

    wish = config.generation
    if sampling.stop_strings is None and not prompts.chat:
        # without a chat template nothing but an end of line tells a model that its turn is over
        sampling.stop_strings = [f"\n{wish.steps + 1}."] if wish.method == "single-step" else ["\n"]
    decoder = GuidedDecoder(
        load_language_model(config.model), prompts.tokenizer, sampling, mix=wish.mix, compile=wish.compile
    )
    tokens, began = 0, time.perf_counter()

    def count(new: int) -> None:
        nonlocal tokens
        tokens += new
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)

    ours = len(ledger.share(list(range(total))))
    chains = (Chain(key, [sentence], prompts, wish) for key, sentence in waiting)
    with tqdm(total=ours, initial=ours - len(waiting), unit="chain", disable=None, position=ledger.rank or None) as bar:
        for chain in grow(chains, decoder, wish.batch_size, count):
            written: dict[str, Any] = {"id": chain.key, "sentences": chain.sentences, **line}
            if chain.reason is not None:
                written |= {"reason": chain.reason, "step": len(chain.sentences) - 1}
            ledger.write(written, ok=chain.reason is None)
            bar.update()
    seconds = time.perf_counter() - began
    return {
        "chains": len(waiting),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mix": decoder.mix.name,
    }


def _acceptable(tokenizer: Any, longest: int) -> Callable[[str], str | None]:
    # a sentence with one would end the prompt, or speak for the model
    special = [token for token in tokenizer.all_special_tokens if token]

    def reason(sentence: str) -> str | None:
        if any(token in sentence for token in special):
            return "special token"
        # a token is a character at least, nearly always; this spares the tokenizer a whole book
        if len(sentence) > 20 * longest or len(tokenizer(sentence, add_special_tokens=False)["input_ids"]) > longest:
            return "too long"
        return None

    return reason


def _selected(config: GenerateConfig, sentences: Sentences) -> list[int] | None:
    if not config.seeds.encoder:
        return None
    from raoe_train.generation.seeds import select_seeds

    chosen = select_seeds([sentence for _, sentence in sentences], config.seeds)
    return [sentences[place][0] for place in chosen]


def _checked_output(config: GenerateConfig) -> Path:
    if not config.output:
        raise ValueError("output is missing: the .jsonl file to write")
    output = Path(config.output).expanduser()
    if output.suffix != ".jsonl":
        raise ValueError(f"output must name a .jsonl file, got {config.output!r}")
    if config.data.input and output.resolve() == Path(config.data.input.partition("#")[0]).expanduser().resolve():
        raise ValueError(f"output {output} is the input itself")
    return output


def _print(result: dict[str, Any], failed: int) -> None:
    print(f"{result['chains']} chains of {result['sentences']} sentences -> {result['output']}")
    if failed:
        reasons = ", ".join(f"{count} {reason}" for reason, count in result["failed_chains"].items())
        print(f"{failed} failed ({reasons}): in {Path(result['output']).name}.failed.jsonl with their reasons")
    if result["skipped"]:
        print("skipped rows: " + ", ".join(f"{count} {reason}" for reason, count in result["skipped"].items()))
    if result["run"]:
        print(f"{result['run']['tokens']} tokens, {result['run']['tokens_per_second']:.0f} a second")
