"""The job `generate`: generate chains of ranking sentences in batches (see raoe_train.generation.chains)."""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sentence_transformers.util import get_device_name
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from raoe_train.data.files import json_rows
from raoe_train.encoders.preflight import check_device, four_bit, loading
from raoe_train.generation.chains import Chain, acceptable, grow, read_starts
from raoe_train.generation.guided import GuidedDecoder, Sampling
from raoe_train.generation.instructions import FEW_SHOT, Instructions
from raoe_train.jobs.settings import GenerateConfig
from raoe_train.jobs.shared import job, require
from raoe_train.outputs import POLL, Output, beside, digest, replacing, versions
from raoe_train.processes import rank_and_world
from raoe_train.settings import Generation, LanguageModel

SLOWEST = 30.0  # maximum seconds between two checks for chains from other processes
FEW = 0.1  # minimum share of verified chains; below it, the job reports a failure


@job(together=True)
def generate(config: GenerateConfig, output: Output) -> dict[str, Any]:
    """Generate chains of sentences that become less similar to a source sentence with each step.

    Each line of OUTPUT is {"id", "sentences": [source, x1 ... xn], "method", "settings", "model", "versions"}, where
    `id` is the row number of the source sentence in the input, counted from 1. Each generated sentence is checked
    against rules, unless generation.verify is false. If a sentence breaks a rule, its chain ends and is written to
    OUTPUT.failed.jsonl, with "reason" and "step". Under torchrun or accelerate, each process generates its share of the
    chains, and rank 0 writes OUTPUT. An interrupted job resumes from the finished chains in OUTPUT.parts/.

    Returns:
        {"output", "chains", "sentences", "failed_chains": {reason: chains}, "failed": whether fewer than a tenth of the
        chains passed verification, "skipped": {reason: rows}, "model", "settings", "versions", "run": {"chains",
        "tokens", "seconds", "tokens_per_second"} of the first process in this run}, also written to OUTPUT.json.
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
        # without a chat template, only a line break marks the end of an answer
        single = generation.method == "single-step"
        sampling = replace(generation, stop_strings=[f"\n{generation.steps + 1}."] if single else ["\n"])
    sentences, skipped = read_starts(data, acceptable(tokenizer, generation.max_input_tokens))
    rank, world = rank_and_world()
    finished, own = read_rows(output.parts), sentences[rank::world]
    waiting = [(key, sentence) for key, sentence in own if key not in finished]
    run: dict[str, Any] = {}
    if waiting:
        decoder = GuidedDecoder(load_language_model(model), tokenizer, sampling)
        prompt = digest([instructions.template, instructions.chat])
        line = {
            "method": generation.method,
            "settings": {**generation.effective(), "prompt": prompt, "revision": model.revision},
            "model": model.name,
            "versions": versions(),
        }
        chains = (Chain(key, [sentence], instructions, generation) for key, sentence in waiting)
        run = _write(grow(chains, decoder, generation.batch_size), output.parts, line, len(own), len(waiting))
    if rank > 0:
        return {}
    delay = POLL
    while len(finished := read_rows(output.parts)) < len(sentences):
        time.sleep(delay)  # other processes still have chains to finish
        delay = min(2 * delay, SLOWEST)
    rows = [finished[key] for key, _ in sentences]
    output.begin()
    _merge(rows, output.path)
    result = {**_summary(rows), "skipped": skipped, "model": model.name, "run": run}
    _print(result, path, generation)
    return result


def load_tokenizer(model: LanguageModel) -> Any:
    if not model.name:
        raise ValueError("model.name is missing: set it to the path or hub name of a language model")
    with loading(model.name):
        return AutoTokenizer.from_pretrained(**_source(model))


def load_language_model(model: LanguageModel) -> Any:
    """Load a causal language model onto its device, in eval mode. Raise ValueError if weights (such as those of the
    head) are missing from the checkpoint, because transformers would initialize them randomly."""
    device = model.device or get_device_name()
    check_device(device)
    weights: dict[str, Any] = {"dtype": model.dtype or "auto", "device_map": model.device_map or {"": device}}
    if model.attention is not None:
        weights["attn_implementation"] = model.attention
    if model.load_in_4bit:
        weights["quantization_config"] = BitsAndBytesConfig(**four_bit(model.dtype))
    with loading(model.name):
        result: Any = AutoModelForCausalLM.from_pretrained(output_loading_info=True, **weights, **_source(model))
    network, info = result
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{model.name} has no weights for {', '.join(missing[:3])}: use a complete language model")
    return network.eval()


def _source(model: LanguageModel) -> dict[str, Any]:
    name, trusted = os.path.expanduser(model.name), model.trust_remote_code
    return {"pretrained_model_name_or_path": name, "trust_remote_code": trusted, "revision": model.revision}


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the complete chains, their sentences, and the failed chains for each reason."""
    good = [row for row in rows if "reason" not in row]
    # without details that differ between chains: numbers and quotations
    reasons = [re.sub(r": .*[\d'\"].*", "", row["reason"]) for row in rows if "reason" in row]
    return {
        "chains": len(good),
        "sentences": sum(len(row["sentences"]) for row in good),
        "failed": len(good) < FEW * len(rows),
        "failed_chains": dict(Counter(reasons).most_common()),
    }


def read_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Return all processes' finished chains as {id: row}. Skip an incomplete last line left by a killed process."""
    rows: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for _, row in json_rows(path, str(path)):
            if isinstance(row, dict):
                rows[row["id"]] = row
    return rows


def _merge(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write complete chains to `path`, and failed chains (rows with a "reason") to OUTPUT.failed.jsonl."""
    with replacing(path) as good_rows, replacing(beside(path, ".failed.jsonl")) as failed_rows:
        with open(good_rows, "w", encoding="utf-8") as good, open(failed_rows, "w", encoding="utf-8") as failed:
            for row in rows:
                (failed if "reason" in row else good).write(json.dumps(row, ensure_ascii=False) + "\n")
    if not beside(path, ".failed.jsonl").stat().st_size:
        beside(path, ".failed.jsonl").unlink()


def _write(chains: Any, folder: Path, line: dict[str, Any], total: int, waiting: int) -> dict[str, Any]:
    """Write all finished chains to one new file in `folder`. The files of interrupted runs stay there. `total` is the
    number of chains assigned to this process, and `waiting` is the number of chains still to generate. Return the
    number of chains and tokens, the duration and the speed."""
    tokens, start, done = 0, time.perf_counter(), total - waiting
    if done:
        print(f"resuming after {done} of {total} chains", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    rank, _ = rank_and_world()
    part = folder / f"{rank:04d}-{time.time_ns()}.jsonl"
    with (
        open(part, "w", encoding="utf-8", buffering=1) as file,  # a line at a time
        tqdm(total=total, initial=done, unit="chain", position=rank or None) as bar,
    ):
        for chain in chains:
            row = {"id": chain.key, "sentences": chain.sentences, **line}
            if chain.reason is not None:
                row |= {"reason": chain.reason, "step": len(chain.sentences) - 1}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            tokens += chain.tokens
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
            bar.update()
    seconds = time.perf_counter() - start
    return {"chains": waiting, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def _print(result: dict[str, Any], output: str, generation: Generation) -> None:
    run = result["run"]
    print(f"wrote {result['chains']} chains with {result['sentences']} sentences to {output}")
    failed = f"failed chains, saved in {output}.failed.jsonl:"
    for label, counts in ((failed, "failed_chains"), ("skipped rows:", "skipped")):
        if result[counts]:
            print(label, ", ".join(f"{reason} ({count})" for reason, count in result[counts].items()))
    if result["failed"]:
        failed = result["failed_chains"]
        few_shot = generation.method != "single-step" and generation.prompt != FEW_SHOT and "no room" not in failed
        is_cut = next(iter(failed), "").endswith("max_new_tokens")  # the most frequent reason
        untried = [f"--generation.max_new_tokens {2 * generation.max_new_tokens}"] * is_cut
        untried += ["--generation.prompt few-shot"] * few_shot + ["--generation.do_sample"] * (not generation.do_sample)
        print(f"few chains passed all checks: try {' '.join(untried) or 'a larger model'}")
    if run:
        print(f"generated {run['tokens']} tokens, {run['tokens_per_second']:.0f} per second")
