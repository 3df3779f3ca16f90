"""The job `generate`: every sentence grows a chain, many of them at once (see raoe_train.generation.growth)."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import fields
from typing import Annotated, Any

from tqdm import tqdm

from raoe_train.artifacts.ledger import Ledger
from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, versions
from raoe_train.artifacts.writing import write_json
from raoe_train.data.settings import Data
from raoe_train.encoders.named import Model, identity
from raoe_train.encoders.sizes import check_fits
from raoe_train.generation.growth import Chain, Generation, grow
from raoe_train.generation.instructions import Instructions
from raoe_train.generation.models import LanguageModel, load_language_model, load_tokenizer
from raoe_train.generation.seeds import Seeds, select_seeds
from raoe_train.generation.starts import acceptable, read_starts
from raoe_train.jobs.shared import file_to_write, job
from raoe_train.recipe import Option, parameters


@job(together=True)
def generate(
    data: Annotated[Data, Option(word="input")] = Data(),
    model: Annotated[LanguageModel, Option(word="name")] = LanguageModel(),
    seeds: Annotated[Seeds, Option()] = Seeds(),
    generation: Annotated[Generation, Option()] = Generation(),
    output: Annotated[str | None, ".jsonl file to write"] = None,
    overwrite: Annotated[bool, "replace the output of another setting"] = False,
) -> dict[str, Any]:
    """Chains of sentences that move away from one step by step.

    OUTPUT has {"id", "sentences": [source, x1 ... xn], "method", "settings", "model", "versions"} a line; `id` is the
    number of the source's row in the input, from 1. A chain that breaks a rule (see raoe_train.generation.rules) is
    given up there and goes to OUTPUT.failed.jsonl, with "reason" and "step"; with generation.verify false it goes on
    and is kept. Under torchrun or accelerate each process writes its share. What is there is not written again.

    Returns:
        {"output", "chains", "sentences", "failed_chains": {reason: chains}, "skipped": {reason: rows}, "model",
        "settings", "versions", "run": {"chains", "tokens", "seconds", "tokens_per_second"} of this run and
        process}; also in OUTPUT.json. "waiting": True where other processes have chains to finish.

    Raises:
        ValueError: a setting that cannot be, a row that is no text, or the output of other settings in the way.
        FileNotFoundError: no such input or model.
    """
    from raoe_train.generation.sampling import Sampling

    if output and not output.endswith(".jsonl"):
        raise ValueError(f"output must name a .jsonl file, got {output!r}")
    path = file_to_write(output, data.input, "the sentences to begin with")
    ledger = Ledger(path, "chain", "sentences", *rank_and_world())
    sampling = Sampling.of(generation.decoding, [known.name for known in fields(Generation)])
    asks = _endpoint(model, generation, sampling)
    tokenizer = None if asks else load_tokenizer(model)
    if not asks:
        check_fits(Model(**vars(model)), train=False)  # type: ignore[arg-type]
    instructions = Instructions(tokenizer, generation.method, generation.steps, generation.prompt, generation.chat)
    if sampling.stop_strings is None and not instructions.chat:
        # without a chat template nothing but an end of line tells a model that its turn is over
        single = generation.method == "single-step"
        sampling.stop_strings = [f"\n{generation.steps + 1}."] if single else ["\n"]
    sentences, skipped = read_starts(data, acceptable(tokenizer, generation.max_input_tokens))
    settings: dict[str, Any] = {
        "model": identity(LanguageModel(model.name) if asks else model),
        "generation": generation.effective(),
        "prompt": digest([instructions.template, instructions.chat]),
        "input": digest(sentences),
        "seeds": seeds.effective(),
    }
    with ledger.locked():
        found = ledger.claim(settings, overwrite)
        if found is not None and "output" in found:
            print(f"{ledger.output} is there already, from the same model and sentences")
            return found
        if found is None:
            found = {"settings": settings, "selected": None}  # all
            if seeds.encoder.name:
                # what the clusters chose is kept: another number of threads may choose otherwise
                chosen = select_seeds([sentence for _, sentence in sentences], seeds)
                found["selected"] = [sentences[place][0] for place in chosen]
            write_json(ledger.summary, found)
    if found["selected"] is not None:
        kept = set(found["selected"])
        sentences = [(key, sentence) for key, sentence in sentences if key in kept]

    with ledger.writing():
        done = ledger.done()
        ours = sentences[ledger.rank :: ledger.world]
        waiting = [(key, sentence) for key, sentence in ours if key not in done]
        run: dict[str, Any] = {}
        if waiting:
            from raoe_train.generation.decoding import GuidedDecoder

            decoder = asks or GuidedDecoder(load_language_model(model), tokenizer, sampling)
            line = {
                "method": generation.method,
                "settings": {**settings["generation"], "prompt": settings["prompt"], "revision": model.revision},
                "model": model.name,
                "versions": versions(),
            }
            chains = (Chain(key, [sentence], instructions, generation) for key, sentence in waiting)
            run = _write(grow(chains, decoder, generation.batch_size), ledger, line, len(ours), len(waiting))
    with ledger.locked():
        found = ledger.claim(settings, False) or found
        if "output" in found:  # another process has ended since
            return found
        merged = ledger.finish(
            [key for key, _ in sentences], lambda line: (len(line["sentences"]), line.get("reason", ""))
        )
        if merged is None:
            print(f"{len(waiting)} chains are done; other processes have some to finish")
            return {"output": str(ledger.output), "waiting": True, "run": run}
        good, bad = merged
        result = {
            "output": str(ledger.output),
            "chains": len(good),
            "sentences": sum(length for length, _ in good),
            "failed_chains": dict(Counter(reason.partition(":")[0] for _, reason in bad).most_common()),
            "skipped": skipped,
            "model": model.name,
            "versions": versions(),
            "run": run,
            "settings": settings,
        }
        write_json(ledger.summary, result)
    _print(result)
    return result


def _endpoint(model: LanguageModel, generation: Generation, sampling: Any) -> Any:
    """What asks a model that is served elsewhere; None where it is to be here."""
    if not generation.endpoint:
        return None
    from raoe_train.generation.endpoint import Endpoint

    if generation.method == "guided":
        raise ValueError(
            "generation.method guided mixes log-probabilities of all tokens, which no endpoint gives: iterative or "
            "single-step, or leave generation.endpoint out"
        )
    if not model.name:
        raise ValueError("model.name is missing: the language model, as the endpoint calls it")
    for name, (_, default, _) in parameters(LanguageModel).items():
        if name not in ("name", "dtype") and getattr(model, name) != default:  # the recipe has a dtype
            raise ValueError(f"model.{name} has no effect on a model that generation.endpoint has")
    return Endpoint(
        generation.endpoint, model.name, sampling, chat=generation.chat is not False, key=generation.key
    )


def _write(grown: Any, ledger: Ledger, line: dict[str, Any], ours: int, waiting: int) -> dict[str, Any]:
    """Write chains as they finish, `waiting` of `ours`; how many, and how fast."""
    tokens, began = 0, time.perf_counter()
    with tqdm(total=ours, initial=ours - waiting, unit="chain", disable=None, position=ledger.rank or None) as bar:
        for chain in grown:
            written: dict[str, Any] = {"id": chain.key, "sentences": chain.sentences, **line}
            if chain.reason is not None:
                written |= {"reason": chain.reason, "step": len(chain.sentences) - 1}
            ledger.write(written)
            tokens += chain.tokens
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)
            bar.update()
    seconds = time.perf_counter() - began
    return {"chains": waiting, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def _print(result: dict[str, Any]) -> None:
    output, run = result["output"], result["run"]
    print(f"{result['chains']} chains of {result['sentences']} sentences -> {output}")
    for what, counts in ((f"failed, in {output}.failed.jsonl:", "failed_chains"), ("skipped rows:", "skipped")):
        if result[counts]:
            print(what, ", ".join(f"{count} {reason}" for reason, count in result[counts].items()))
    if run:
        print(f"{run['tokens']} tokens, {run['tokens_per_second']:.0f} a second")
