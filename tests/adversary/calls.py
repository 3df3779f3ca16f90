"""Python calls of careless users: wrong keywords and types, rows of any shape, prompts, dtypes."""

import functools
import inspect
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from pandas import DataFrame

import raoe_kernels as ops
import raoe_train as rt
from raoe_train.cli import config_of
from raoe_train.config import keys_of, keywords_of
from raoe_train.data.files import write_rows
from tests.adversary.cases import Case
from tests.tiny import SENTENCES, batch, tiny_encoder, total
from tests.training.small_runs import arguments

FOLDER = tempfile.TemporaryDirectory()
NEVER = ("object()", "b'x'", "print", "float('nan')")  # values that no setting has
VALUES = (*NEVER, "None", "-1", "0", "1.5", "True", "'x'", "''", "[]", "{}", "[None]", "{1: 2}", "10**30", "Path('x')",
          "torch.ones(2)", "np.float64(2)", "str", "(1,)", "'a\\ud800'", "['a', 'b']", "{'a': {'b': 1}}")  # fmt: skip
TENSORS = (".half()", ".bfloat16()", ".double()", ".long()", ".bool()", ".numpy()", ".tolist()", "[:0]", "[None]",
           "[:1]", "[..., None]", ".to('meta')", ".to_sparse()", ".to(torch.complex64)", ".to(torch.float8_e4m3fn)",
           ".mT", " * float('nan')")  # fmt: skip
PROMPTS = ("'q: '", "'{text}'", "'{text} {text}'", "'{'", "'{}'", "'{condition}'", "'{x}: {text}'", "'x' * 5000", "''",
           "{'anchor': 'q: '}", "{'no': 'q: '}", "{'query': '{text}'}", "['q: ']", "{'a': {'anchor': 1}}")  # fmt: skip
CELLS = ("a dog", "", " ", None, 3, 1.5, True, [], ["a dog"], ["a", "b"], [""], [None], {"text": "a"}, [{"text": "a"}],
         [["a"]], ["a dog"] * 40, ["the dog", 3], {"a": []}, "x" * 3000)  # fmt: skip
ROWS: tuple[dict[str, Any], ...] = (
    {"query": "a", "pos": ["b"], "neg": ["c", "d"]}, {"anchor": "a", "positive": "b", "negative": "c"},
    {"sent0": "a", "sent1": "b"}, {"sentence1": "a", "sentence2": "b"}, {"premise": "a", "hypothesis": "b", "label": 0},
    {"text1": "a", "text2": "b", "score": 0.5, "label": 1}, {"query": "a", "positive_passages": [{"text": "b"}]},
)  # fmt: skip
LOSSES = ("InfoNCELoss", "TripletLoss", "CoSENTLoss", "RAOELoss", "SigmoidLoss")
PAIRS = "".join(f"{text}\t{text[:9]}\t{n / 10}\t{n % 3}\n" for n, text in enumerate(SENTENCES))
FILES = {"rows.tsv": f"sentence1\tsentence2\tscore\tlabel\n{PAIRS}".encode(),
         "classes.tsv": "".join(["sentence\tlabel\n", *(f"{t}\t{n % 2}\n" for n, t in enumerate(SENTENCES))]).encode(),
         "pairs.tsv": "".join(["sentence1\tsentence2\n", *(f"{t}\t{t[::-1]}\n" for t in SENTENCES)]).encode(),
         "texts.txt": "\n".join(SENTENCES).encode()}  # fmt: skip
MODEL, TINY = {"model.name": "saved()"}, {"model": "tiny()"}
JOBS: dict[str, dict[str, str]] = {
    "encode": {**MODEL, "data.input": "'texts.txt'", "output": "'o.npy'"}, "export": {**MODEL, "output": "'o'"},
    "evaluate": {**MODEL, "tasks": "['rows.tsv']", "output": "'o.json'"}, "check": MODEL,
    "mine": {**MODEL, "data.input": "'classes.tsv'", "loss": "'triplet'", "output": "'o.tsv'"},
    "score": {"teachers": "[saved(), saved('float16')]", "data.input": "'pairs.tsv'", "output": "'o.tsv'"},
    "train": {**MODEL, "data.train": "['rows.tsv']", "training.max_steps": "2", "output": "'o'"},
}  # fmt: skip
AGAIN = ("batch_size=1", "model.dtype='float16'", "model.dtype='bfloat16'", "training.bf16=True", "training.fp16=True",
         "training.packed=True", "model.attention='raoe_packed'", "model.lora={'r': 2, 'target_modules': ['query']}",
         "training.keep='auto'", "loss.matryoshka_dims=[8]", "data.score_scale=[0, 1]")  # fmt: skip
ARGUMENTS = {"labels": "L", "phi": "P", "omega": "1", "guidance": "1.5", **dict.fromkeys("qkv", "Q")} | dict.fromkeys(
    ("similarity", "scores"), "C") | dict.fromkeys(
    ("anchors", "positives", "a", "b", "student", "teacher", "current", "previous"), "A")  # fmt: skip
TRAINED = TINY | {"args": "args()", "train_dataset": "rt.read_pairs('rows.tsv')", "loss": "rt.losses.CoSENTLoss",
                  "eval_dataset": "None", "by_length": "True", "packed": "'auto'", "keep": "0.0"}  # fmt: skip
CALIBRATED = TINY | {"loss": "rt.losses.CoSENTLoss(tiny())", "pairs": "rt.read_pairs('rows.tsv')", "seed": "1"}


@functools.cache
def saved(dtype: str = "float32") -> str:
    """The folder of a tiny encoder in a dtype."""
    tiny_encoder(double=False).to(getattr(torch, dtype)).save_pretrained(f"{FOLDER.name}/{dtype}")
    return f"{FOLDER.name}/{dtype}"


def trained(**settings: Any) -> list[Any]:
    trainer = rt.Trainer(**settings)
    trainer.train()
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def lost(name: str, **settings: Any) -> Any:
    """The value of a loss, if it reads pairs or triplets."""
    model = tiny_encoder(double=False)
    loss, (columns, labels) = getattr(rt.losses, name)(model, **settings), batch(model)
    if isinstance(loss, rt.losses.PairLoss):
        return total(loss(columns, labels))
    triplets = (rt.losses.InfoNCELoss, rt.losses.SigmoidLoss, rt.losses.TripletLoss)
    return total(loss([*columns, columns[0]], None)) if isinstance(loss, triplets) else None


def table(rows: list[dict[str, Any]], kind: str) -> Any:
    """Rows in memory, or the name of a file with them."""
    if "." not in kind:
        return {"Dataset": Dataset.from_list, "DataFrame": DataFrame}[kind](rows)
    write_rows(Path(kind), [*rows[0]], rows)
    return kind


NAMES: dict[str, Any] = {
    "rt": rt, "ops": ops, "torch": torch, "np": np, "Path": Path, "saved": saved, "trained": trained, "table": table,
    "partial": functools.partial, "lost": lost, "tiny": functools.partial(tiny_encoder, double=False),
    "args": lambda **changes: arguments(Path("."), max_steps=2, logging_steps=1, **changes),
    "A": torch.rand(4, 8), "C": torch.rand(4), "L": torch.tensor([0, 1, 2, 0]), "P": torch.rand(2, 4, 4),
    "Q": torch.rand(1, 2, 4, 8),
}  # fmt: skip


def case(function: str, settings: dict[str, str], may: bool = True, **changes: str) -> Case:
    given = ", ".join(f"{name!r}: {value}" for name, value in {**settings, **changes}.items())
    return Case((), FILES, f"{function}(**{{{given}}})", may)


def wrong(function: str, valid: dict[str, str], names: Iterable[str] = (), strict: bool = True) -> Iterator[Case]:
    """Each keyword with each value, misspelt, and left out. Where it is not `strict`, any value may be right."""
    for name in dict.fromkeys([*valid, *names]):
        tensors = [valid[name] + each for each in TENSORS] if valid.get(name) in ("A", "C", "L", "P", "Q") else []
        for value in (*VALUES, *tensors):
            if value != "10**30" or not name.endswith("_steps"):  # which trains for ever
                yield case(function, valid, not strict or value not in NEVER, **{name: value})
        yield case(function, valid, False, **{f"{name}x": valid.get(name, "1")})
        yield case(function, {key: value for key, value in valid.items() if key != name})


def calls() -> Iterator[Case]:
    """All cases, always in the same order."""
    for job, valid in JOBS.items():
        function, keys = "partial(rt.train, 'raoe-s1')" if job == "train" else f"rt.{job}", keys_of(config_of(job))
        yield from wrong(function, valid, keys)
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            start = {name: value.replace("saved()", f"saved({dtype!r})") for name, value in valid.items()}
            for name, _, value in (each.partition("=") for each in AGAIN):
                yield case(function, start, **{name: value})
        for key in [key for key in keys if key.endswith("prompt")] + ["training.prompts"] * (job == "train"):
            encoder = {} if key[0] in "pm" or "." not in key else {f"{key.rpartition('.')[0]}.name": "saved()"}
            yield from (case(function, valid | encoder, **{key: prompt}) for prompt in PROMPTS)
    yield from wrong("rt.load_encoder", {"encoder": "saved()"}, [key[6:] for key in keys_of(config_of("check"))][1:17])
    for name in sorted({*ops.__all__} - {"backends", "use_backend"}):
        parameters = inspect.signature(getattr(ops, name)).parameters
        valid = {key: ARGUMENTS[key] for key, each in parameters.items() if each.default is each.empty}
        yield from wrong(f"ops.{name}", valid, parameters)
    for function, valid in {"trained": TRAINED, "rt.calibrate": CALIBRATED, "rt.read_pairs": {"source": "'rows.tsv'"},
                            "rt.evaluate_model": TINY | {"tasks": "['rows.tsv']"}}.items():  # fmt: skip
        names = inspect.signature(getattr(rt, function[3:])).parameters if function == "rt.read_pairs" else ()
        yield from wrong(function, valid, names, strict=False)
    for name in rt.losses.__all__:
        loss = getattr(rt.losses, name)
        given = {"embed": "len"} if getattr(loss, "asks_teacher", False) else {}
        if name not in ("Loss", "AutoLoss", "ByLength") and not inspect.isabstract(loss):
            names = [each for each in keywords_of(loss) if each != "similarity_fct"]  # any function
            yield from wrong(f"partial(lost, {name!r})", given, names, strict=False)
    yield from (case("trained", TRAINED, args=f"args(prompts={prompt})") for prompt in PROMPTS)
    for valid in ROWS:
        for rows in ([valid, {**valid, column: cell}, valid, valid] for column in valid for cell in CELLS):
            for kind in ("Dataset", "DataFrame", "a.jsonl", "a.tsv", "a.csv"):
                for loss in LOSSES:
                    source, made = f"table({rows}, {kind!r})", f"rt.losses.{loss}"
                    if "." in kind:
                        yield case("rt.train", JOBS["train"], **{"data.train": source, "loss": repr(loss)})
                    else:
                        yield case("trained", TRAINED, train_dataset=source, loss=made)
