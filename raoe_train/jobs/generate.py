"""The job `generate`: generate many chains of ranking sentences at once (see raoe_train.generation.chains)."""

import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from raoe_train.artifacts.processes import rank_and_world
from raoe_train.artifacts.provenance import digest, versions
from raoe_train.artifacts.resume import Output, SharedRows
from raoe_train.config import defaults_of
from raoe_train.encoders.settings import identity
from raoe_train.generation.chains import Chain, grow
from raoe_train.generation.guided import GuidedDecoder, Sampling
from raoe_train.generation.instructions import FEW_SHOT, Instructions
from raoe_train.generation.models import load_language_model, load_tokenizer
from raoe_train.generation.starts import acceptable, read_starts
from raoe_train.jobs.settings import GenerateConfig
from raoe_train.jobs.shared import job, require
from raoe_train.settings import Generation

FEW = 0.1  # minimum share of verified chains; below it, the job reports a failure
SILENT = 30.0  # seconds between progress lines if there is no progress bar


@job(together=True)
def generate(config: GenerateConfig) -> dict[str, Any]:
    """Generate chains of sentences that move away from a source sentence step by step.

    Each line of OUTPUT is {"id", "sentences": [source, x1 ... xn], "method", "settings", "model", "versions"}, where
    `id` is the row number of the source in the input, from 1. A chain that breaks a rule stops at this step and goes to
    OUTPUT.failed.jsonl, with "reason" and "step". If generation.verify is false, no rule is checked. Under torchrun
    or accelerate, each process generates its share. An interrupted job resumes after the last sentence of each chain.

    Returns:
        {"output", "chains", "sentences", "failed_chains": {reason: chains}, "failed": whether fewer than a tenth of the
        chains passed verification, "skipped": {reason: rows}, "model", "settings", "versions", "run": {"chains",
        "tokens", "seconds", "tokens_per_second"} of this run and process}, also written to OUTPUT.json. If
        other processes still have chains to finish, the result is {"output", "waiting": True, "run"}.
    """
    data, model, generation = config.data, config.model, config.generation
    require(data.input, "data.input", "the sentences to start chains from")
    path = require(config.output, "output", "the .jsonl file to write")
    if not path.endswith(".jsonl"):
        raise ValueError(f"output must name a .jsonl file, got {path!r}")
    tokenizer = load_tokenizer(model)
    instructions = Instructions(tokenizer, generation.method, generation.steps, generation.prompt, generation.chat)
    sampling: Sampling = generation
    if sampling.stop_strings is None and not instructions.chat:
        # without a chat template, only a line end marks the end of an answer
        single = generation.method == "single-step"
        sampling = replace(generation, stop_strings=[f"\n{generation.steps + 1}."] if single else ["\n"])
    sentences, skipped = read_starts(data, acceptable(tokenizer, generation.max_input_tokens))
    settings: dict[str, Any] = {
        "model": identity(model),
        "generation": generation.effective(),
        "prompt": digest([instructions.template, instructions.chat]),
        "input": digest(sentences),
    }
    output = Output(path, settings, config.overwrite, defaults=defaults_of(type(config)))
    if finished := output.finished(say=True):
        return finished
    rank, world = rank_and_world()
    rows, own = SharedRows(output), sentences[rank::world]
    earlier = rows.read()
    begun = ((key, earlier.get(key, {"begun": [sentence]}).get("begun")) for key, sentence in own)
    waiting = [(key, texts) for key, texts in begun if texts]
    run: dict[str, Any] = {}
    if waiting:
        decoder = GuidedDecoder(load_language_model(model), tokenizer, sampling)
        line = {
            "method": generation.method,
            "settings": {**settings["generation"], "prompt": settings["prompt"], "revision": model.revision},
            "model": model.name,
            "versions": versions(),
        }
        chains = (Chain(key, texts, instructions, generation) for key, texts in waiting)
        run = _write(grow(chains, decoder, generation.batch_size), rows, line, len(own), len(waiting))
    with output.finish_lock():
        if finished := output.finished():  # another process has finished the output
            return finished
        output.begin()  # before merging, because a file without a record would never be replaced
        finished_rows = [row for row in map(rows.read().get, dict(sentences)) if row and "begun" not in row]
        if len(finished_rows) < len(sentences):
            print(f"this process has finished its {len(waiting)} chains; other processes are still working")
            return {"output": path, "waiting": True, "run": run}
        rows.merge(finished_rows)
        good = [row for row in finished_rows if "reason" not in row]
        # without details that differ between chains: numbers and quotations
        reasons = [re.sub(r": .*[\d'\"].*", "", row["reason"]) for row in finished_rows if "reason" in row]
        result = {
            "chains": len(good),
            "sentences": sum(len(row["sentences"]) for row in good),
            "failed": len(good) < FEW * len(sentences),
            "failed_chains": dict(Counter(reasons).most_common()),
            "skipped": skipped,
            "model": model.name,
            "run": run,
        }
        result = output.finish(result)
    _print(result, generation)
    return result


def _write(chains: Any, rows: SharedRows, line: dict[str, Any], total: int, waiting: int) -> dict[str, Any]:
    """Write each chain after each sentence. `total` is the number of this process's chains, of which `waiting` are not
    finished. Return the number of chains and tokens, and the speed."""
    tokens, done, start = 0, total - waiting, time.perf_counter()
    printed = start
    place = rank_and_world()[0] or None
    with tqdm(total=total, initial=done, unit="chain", disable=None, position=place) as bar:
        for number, chain in enumerate(chains, 1):
            row: dict[str, Any] = {"begun": chain.sentences}
            if chain.finished:
                row = {"id": chain.key, "sentences": chain.sentences, **line}
                if chain.reason is not None:
                    row |= {"reason": chain.reason, "step": len(chain.sentences) - 1}
                tokens, done = tokens + chain.tokens, done + 1
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                bar.update()
            rows.write(chain.key, row)
            if bar.disable and time.perf_counter() - printed > SILENT:
                printed = time.perf_counter()
                print(f"{done} of {total} chains; {number} answers in this run", flush=True)
    seconds = time.perf_counter() - start
    return {"chains": waiting, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def _print(result: dict[str, Any], generation: Generation) -> None:
    output, run = result["output"], result["run"]
    print(f"{result['chains']} chains, {result['sentences']} sentences in total -> {output}")
    for label, counts in ((f"failed, in {output}.failed.jsonl:", "failed_chains"), ("skipped rows:", "skipped")):
        if result[counts]:
            print(label, ", ".join(f"{count} {reason}" for reason, count in result[counts].items()))
    if result["failed"]:
        failed = result["failed_chains"]
        few_shot = generation.method != "single-step" and generation.prompt != FEW_SHOT and "no room" not in failed
        is_cut = next(iter(failed), "").endswith("max_new_tokens")  # the most frequent reason
        untried = [f"--generation.max_new_tokens {2 * generation.max_new_tokens}"] * is_cut
        untried += ["--generation.prompt few-shot"] * few_shot + ["--generation.do_sample"] * (not generation.do_sample)
        print(f"few chains passed all checks: try {' '.join(untried) or 'a larger model'}")
    if run:
        print(f"{run['tokens']} tokens, {run['tokens_per_second']:.0f} per second")
