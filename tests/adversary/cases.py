"""Input of careless or hostile users: words for options, files for data, recipes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from raoe_train.cli import JOBS, config_of
from raoe_train.config import keys_of


@dataclass(frozen=True)
class Case:
    """A command, or a call in Python, in a folder with these files. It ends with a one-sentence error, or if it `may`,
    with a result of finite numbers."""

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    call: str = ""
    may: bool = False


# Options that every job needs before it reads files. The models do not exist, so no case can succeed.
NEEDS: dict[str, tuple[str, ...]] = {
    "train": ("raoe-s1", "--model.name", "./no", "--data.dev", "none", "--output", "out"),
    "score": ("--teachers", "./no", "./nobody", "--output", "out.tsv"),
    "mine": ("--model.name", "./no", "--output", "out.jsonl"),
    "evaluate": ("--model.name", "./no", "--output", "out.json"),
    "encode": ("--model.name", "./no", "--output", "out.npy"),
    "generate": ("--model.name", "./no", "--output", "out.jsonl"),
    "export": ("--model.name", "./no", "--output", "out"),
    "check": ("--model.name", "./no"),
}
READS = {
    "train": "--data.train", "score": "--data.input", "mine": "--data.input",
    "evaluate": "--tasks", "encode": "--data.input", "generate": "--data.input",
}  # fmt: skip
WORDS = ("", "nan", "-1e999", "\ud800", "[1", "{}", "~/", "../../x", "-1", "0", "yes", "1e3", "x" * 5000, "\x00", "a=b",
         "null", "[]", "$(touch ran)", "9" * 30, " ", "*.tsv", "true")  # fmt: skip
PAIR = '{"sentence1": "a", "sentence2": "b", "score": %s, "label": %s}\n'
FILES = {
    "empty.tsv": b"",
    "header.tsv": b"sentence1\tsentence2\tscore\n",
    "twice.tsv": b"score\tscore\n1\t2\n",
    "short.tsv": b"sentence1\tsentence2\tscore\na\tb\n",
    "latin.tsv": b"sentence1\tsentence2\tscore\n\xe9\tb\t1\n",
    "quote.csv": b'sentence1,sentence2,score\n"a,b,1\n',
    "bytes.csv": bytes(range(256)),
    "zeros.parquet": bytes(512),
    "magic.parquet": b"PAR1" + bytes(64) + b"PAR1",
    "cut.tsv.gz": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03abc",
    "plain.jsonl.gz": b"no gzip",
    "deep.jsonl": b'{"sentence1": ' + b"[" * 100_000,
    "digits.jsonl": (PAIR % ("1" + "0" * 400, 0)).encode(),
    "many.jsonl": (PAIR % ("1" + "0" * 5000, 0)).encode(),
    "nan.jsonl": (PAIR % ("NaN", 0)).encode(),
    "list.jsonl": (PAIR % ("[" + "1," * 50_000 + "1]", 0)).encode(),
    "half.jsonl": b'{"sentence1": "\\ud800", "sentence2": "b", "score": 1}\n',
    "key.jsonl": b'{"\\ud800": 1, "sentence1": "a", "sentence2": "b", "score": 1}\n',
    "label.jsonl": (PAIR % (1, '{"a": []}')).encode(),
    "array.jsonl": b"[1, 2]\n",
    "null.jsonl": b"null\n",
    "nul.jsonl": b'{"sentence1": "\\u0000", "sentence2": "b", "score": "\\u0000"}\n',
    "no.suffix": b"a\tb\n",
}
RECIPES = {
    "itself": "extends: recipe.yaml\n",
    "config": "config: recipe.yaml\n",
    "loss": "loss: {class_path: os.system, init_args: {command: touch ran}}\n",
    "alias": "model: &m {name: *m}\n",
    "list": "data: {train: &t [*t]}\n",
    "deep": "a: " + "[" * 3000,
    "tag": "model: !!python/object/apply:os.system ['touch ran']\n",
    "date": "2020-01-01: x\n",
    "keys": "? [1, 2]\n: x\n",
    "number": "7\n",
    "bytes": "model: !!binary aGVsbG8=\n",
    "null": "model: null\ntraining: null\noutput: 3\n",
    "nested": "model: {name: {name: {name: x}}}\n",
    "none": "data: [none]\n",
    "tab": "a:\n\tb: 1\n",
}


def cases() -> Iterator[Case]:
    """All cases, always in the same order."""
    for job, needs in NEEDS.items():
        for key in keys_of(config_of(job)):
            taken = {f"--{key}"} & set(needs)
            for word in WORDS if not taken else ():
                yield Case((job, *needs, f"--{key}={word}"))
    for job, option in READS.items():
        for name, content in FILES.items():
            yield Case((job, *NEEDS[job], option, name), {name: content})
            yield Case((job, *NEEDS[job], option, name, "--data.on_error", "skip"), {name: content})
    for job in JOBS:
        for text in RECIPES.values():
            absent = ("--model.name", "./no") if job in ("check", "export") else ()  # where there is a default
            yield Case((job, "recipe.yaml", *absent), {"recipe.yaml": text.encode()})
    for words in ((), ("train", "--"), ("train", "--=x"), ("train", "a", "b"), ("\ud800",), ("score", "--.", "x"),
                  ("train", "--output", "a", "--output", "b"), ("train", "--loss.name"),
                  ("train", "--model.", "x"), ("train", "--.model", "x"), ("check", "--model.device", "")):  # fmt: skip
        yield Case(words)
