"""SentEval's folders: valid files of each layout."""

from __future__ import annotations

from random import Random

from tests.fuzz.tables import say

SUBSETS = ("FNWN", "headlines", "OnWN")
LAYOUTS = {
    "mr": {"MR/rt-polarity.pos": "", "MR/rt-polarity.neg": ""},
    "trec": {"TREC/train_5500.label": "train", "TREC/TREC_10.label": "test"},
    "mrpc": {f"MRPC/msr_paraphrase_{split}.txt": split for split in ("train", "test")},
    "sst2": {f"SST/binary/sentiment-{split}": split for split in ("train", "dev", "test")},
    "stsb": {f"STS/STSBenchmark/sts-{split}.csv": split for split in ("train", "dev", "test")},
    "sick": {"SICK/SICK_train.txt": "train", "SICK/SICK_trial.txt": "dev", "SICK/SICK_test_annotated.txt": "test"},
    "sts13": {f"STS/STS13-en-test/STS.input.{subset}.txt": "test" for subset in SUBSETS},
}
HEADED = {
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n",
    "sick": "pair_ID\tsentence_A\tsentence_B\tscore\tjudgment\n",
}


def _gold(file: str) -> str:
    return file.replace("STS.input.", "STS.gs.")


def _line(name: str, rng: Random, n: int) -> str:
    a, b = say(rng, n), say(rng, -n)
    return {
        "mr": a, "trec": f"DESC:def {a}", "mrpc": f"{n % 2}\t1\t2\t{a}\t{b}", "sst2": f"{a}\t{n % 2}",
        "stsb": f"main\tfile\t2012\t{n}\t{n / 7:.3f}\t{a}\t{b}", "sick": f"{n}\t{a}\t{b}\t{1 + n % 4}.5\tNEUTRAL",
        "sts13": f"{a}\t{b}",
    }[name]  # fmt: skip


def made(name: str, rng: Random) -> dict[str, bytes]:
    """A valid set in SentEval's layout: {file: content}."""
    files = {}
    encoding = "latin-1" if name in ("mr", "trec") else "utf-8"
    for file in LAYOUTS[name]:
        count = rng.randrange(1, 5)
        body = "".join(_line(name, rng, n) + "\n" for n in range(count))
        files[file] = (HEADED.get(name, "") + body).encode(encoding, "replace")
        if name == "sts13":
            files[_gold(file)] = "".join(rng.choice(("", f"{n}.25")) + "\n" for n in range(count)).encode()
    return files
