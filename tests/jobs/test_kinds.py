"""Kinds of faults in jobs, each with several members: settings that match nothing, configuration objects with keywords,
inputs that are no files, what a failed job leaves, and how jobs look to tools."""

import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import raoe_train as rt
from raoe_train import cli, outputs, parts
from raoe_train.config import keywords_of
from raoe_train.data.sources import labels_of
from raoe_train.jobs.settings import CheckConfig, EncodeConfig, EvaluateConfig
from raoe_train.losses.infonce import Contrastive
from raoe_train.settings import Data, Model
from tests.tiny import SENTENCES, tiny_encoder
from tests.training.small_runs import settings, write_pairs


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(SENTENCES) + "\n")
    return str(tmp_path / "texts.txt")


WORDS = {"entailment": 0, "neutral": 1, "contradiction": 2}


@pytest.mark.parametrize("name", ["train", "train.tsv", "FILE"])
def test_labels_of_a_source_go_by_any_of_its_names(tmp_path, name):
    source = str(tmp_path / "train.tsv.gz") if name == "FILE" else "folder/train.tsv"
    data = Data(train=[source, "other.tsv"], labels={source if name == "FILE" else name: WORDS})
    assert labels_of(source, data) == WORDS and labels_of("other.tsv", data) is None


@pytest.mark.parametrize(
    ("settings_", "named"),
    [
        ({"data.labels": {"trian.tsv": WORDS}}, "train.tsv"),
        ({"data.labels": {"train": WORDS, "neutral": 1}}, "train.tsv"),
        ({"data.columns": {"scoer": "score"}}, "score"),
        ({"data.columns": {"score": "scoer"}}, "scoer"),
        ({"data.dev": ["dev.tvs"]}, "dev.tvs"),
        ({"evaluation.tasks": ["stx:a.tsv"]}, "stx"),
        ({"loss": "RAOELos"}, "RAOELoss"),
        ({"loss": "CosentLoss"}, "CoSENTLoss"),
        ({"loss.scal": 3}, "scale"),
        ({"training.batch_sampler": "no_duplicate"}, "no_duplicate"),
        ({"training.optim": "adamm"}, "adamm"),
        ({"training.lr_scheduler_type": "cosin"}, "SchedulerType"),
        ({"training.learning_rate_mapping": {"no_such_weight": 1e-3}}, "no_such_weight"),
        ({"model.lora": {"target_module": ["query"]}}, "target_module"),
        ({"teacher.prompt": "query: "}, "teacher"),
        ({"trainig": {"seed": 1}}, "training"),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["python", "shell"])
def test_settings_that_match_nothing_are_errors(tmp_path, encoder, capsys, settings_, named, way):
    base = settings(tmp_path, **{"model.name": encoder, "model.scratch": {}, "evaluation.before": False})
    made = {**base, **settings_}
    if way == "python":
        with pytest.raises((ValueError, OSError), match=named):
            rt.train("raoe-s1", **made)
        return
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(base))
    texts = {key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in settings_.items()}
    words = [f"--{key}={text}" for key, text in texts.items()]
    assert cli.main(["train", "raoe-s1", "--config", str(tmp_path / "a.yaml"), *words]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "config", "changes", "named"),
    [
        (rt.encode, EncodeConfig(), {"output": "a.txt"}, "a.txt"),
        (rt.evaluate, EvaluateConfig(), {"model.name": "/no/such", "tasks": ["x.tsv"]}, "x.tsv"),
        (rt.check, CheckConfig(), {"model": {"name": "/no/such"}}, "/no/such"),
    ],
    ids=["encode", "evaluate", "check"],
)
def test_keywords_override_a_configuration_object(texts, encoder, job, config, changes, named):
    config.model.name = encoder
    if job is rt.encode:
        config.data.input = texts
    with pytest.raises((ValueError, OSError), match=named):
        job(config, **changes)
    assert config.model.name == encoder and getattr(config, "output", None) is None  # the object stays as it is
    with pytest.raises(ValueError, match="unknown key"):
        job(config, outptu="x")


@pytest.mark.parametrize("name", cli.JOBS)
def test_jobs_have_their_own_signature(name):
    parameters = [*inspect.signature(getattr(rt, name)).parameters.values()]
    assert [(each.name, each.kind) for each in parameters] == [
        ("recipe", inspect.Parameter.POSITIONAL_ONLY), ("settings", inspect.Parameter.VAR_KEYWORD)]  # fmt: skip
    assert getattr(rt, name).__name__ == name and getattr(rt, name).__doc__


def test_keywords_for_type_checkers_are_those_of_the_classes():
    own = inspect.signature(rt.losses.InfoNCELoss).parameters
    assert {*Contrastive.__annotations__} == keywords_of(rt.losses.InfoNCELoss).keys() - own


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("key", ["evaluate", "corpus", "encode", "recipe", "train", "record"])
def test_what_is_no_file_is_refused_at_once(tmp_path, encoder, monkeypatch, key, kind):
    monkeypatch.chdir(tmp_path)
    if key == "record" and kind != "pipe":
        pytest.skip("as a pipe")
    path = {"encode": "a.txt", "recipe": "a.yaml", "record": "out.npy.json"}.get(key, "a.tsv")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(path)
    else:
        os.symlink("/dev/zero", path)
    rows = tmp_path / "rows.tsv"
    rows.write_text("anchor\tpositive\na\tb\n")
    (tmp_path / "texts.txt").write_text("a\nb\n")
    jobs = {
        "evaluate": lambda: rt.evaluate(model={"name": encoder}, tasks=[path]),
        "corpus": lambda: rt.mine(
            model={"name": encoder}, data={"input": str(rows)}, mining={"corpus": path}, output="o.tsv"
        ),
        "encode": lambda: rt.encode(model={"name": encoder}, data={"input": path}, output="o.npy"),
        "recipe": lambda: rt.encode(path),
        "train": lambda: rt.train("raoe-s1", **settings(tmp_path, **{"data.train": [path]})),
        "record": lambda: rt.encode(model={"name": encoder}, data={"input": "texts.txt"}, output="out.npy"),
    }
    with pytest.raises((ValueError, OSError)):
        jobs[key]()


@pytest.mark.parametrize("job", ["encode", "train", "evaluate"])
def test_a_failed_job_leaves_no_folders(tmp_path, encoder, texts, job):
    folder = tmp_path / "a" / "b"
    options = {
        "encode": {"data.input": str(tmp_path / "none.txt"), "output": str(folder / "c.npy")},
        "evaluate": {"tasks": [str(tmp_path / "none.tsv")], "output": str(folder / "c.json")},
        "train": {"data.train": [str(tmp_path / "none.tsv")], "output": str(folder / "c")},
    }
    with pytest.raises((ValueError, OSError)):
        rt.run(job, **{"model.name": encoder, **options[job]})
    assert not (tmp_path / "a").exists()


def test_encode_resumes_and_keeps_shards_only_until_the_end(tmp_path, encoder, texts, monkeypatch):
    """Shards of four rows; the second run computes the missing ones, and the result is that of one piece."""
    monkeypatch.setattr(parts, "SHARD", 4)
    options = {"model": {"name": encoder, "device": "cpu"}, "data": {"input": texts}, "output": str(tmp_path / "o.npy")}
    encode, calls = sys.modules["raoe_train.jobs.encode"], []
    whole = encode.encode_sentences

    def count(model, sentences, **options):
        calls.append(len(sentences))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(model, sentences, **options)

    monkeypatch.setattr(encode, "encode_sentences", count)
    with pytest.raises(KeyboardInterrupt):
        rt.encode(**options)
    rt.encode(**options)
    assert calls == [4, 4, 4, 3] and not (tmp_path / "o.npy.parts").exists()
    expected = whole(rt.load_encoder(encoder, device="cpu"), SENTENCES)
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), expected, atol=1e-6)


MEMORY = """
import resource, sys
import raoe_train as rt

most = []
for count in (4096, 100_000):
    open("texts.txt", "w").writelines(sys.argv[1].format(n) + "\\n" for n in range(count))
    rt.encode(model={"name": "a", "device": "cpu"}, data={"input": "texts.txt"}, output=f"{count}.npy")
    most.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print((most[1] - most[0]) * 1024 / (100_000 * 256 * 4))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB")
@pytest.mark.parametrize("line", ["{}", "the dog {} runs", "the same"])
def test_encode_holds_a_part_of_the_embeddings(tmp_path, line):
    """What it takes beyond the memory for one shard is less than the array that it writes."""
    model = Model(
        name="scratch",
        device="cpu",
        scratch={"vocab_size": 200, "hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 64},
    )
    rt.load_encoder(model, sentences=[*SENTENCES, "0 1 2 3 4 5 6 7 8 9"]).save_pretrained(str(tmp_path / "a"))
    command = [sys.executable, "-c", MEMORY, line]
    output = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert 0 <= float(output.split()[-1]) < 1.3


@pytest.mark.parametrize("loss", ["triplet", "contrastive", "multiple_negatives"])
def test_mining_names_the_threshold_that_gives_rows(tmp_path, encoder, loss):
    rows = "".join(f"{text}\t{number % 2}\n" for number, text in enumerate(SENTENCES))
    (tmp_path / "rows.tsv").write_text("sentence\tlabel\n" + rows)
    source, target = str(tmp_path / "rows.tsv"), str(tmp_path / "o.tsv")
    made = {"model.name": encoder, "data.input": source, "loss": loss, "output": target}
    with pytest.raises(ValueError, match="below") as problem:
        rt.mine(**made, **{"mining.threshold": 0.99999})
    value = float(str(problem.value).rpartition(" ")[2]) - 1e-4
    assert rt.mine(**made, **{"mining.threshold": value})["examples"] > 0


@pytest.mark.parametrize("setting", [{"pooling": "cls"}, {"prompt": "query: {text}"}, {"max_seq_length": 4}])
def test_the_reference_is_the_start_as_configured(tmp_path, encoder, setting):
    """The S of the start itself is what its reference gives: both embed texts equally."""
    lines = [f"{text}\t{n % 2}\t{split}\n" for split in ("train", "test") for n, text in enumerate(SENTENCES)]
    (tmp_path / "toy.tsv").write_text("sentence\tlabel\tsplit\n" + "".join(lines))
    polarity = {"k": 2, "sources": 1}
    model = {"name": encoder, "device": "cpu", **setting}
    task = f"polarity:{tmp_path / 'toy.tsv'}"
    made = settings(tmp_path, **{"model": model, "evaluation.tasks": [task], "polarity": polarity, "data.dev": None})
    for key in [key for key in made if key.startswith("model.")]:
        del made[key]
    before = rt.train("raoe-s1", **made)["before"]["tasks"][task]
    start = rt.load_encoder(encoder, device="cpu", **setting)
    expected = rt.evaluate_model(start, tasks=[task], polarity={**polarity, "reference": model})
    assert before["similarity"] == pytest.approx(expected["tasks"][task]["similarity"], abs=1e-3)


def test_every_job_reads_a_static_model(tmp_path, texts):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model = tiny_encoder(double=False)
    module = StaticEmbedding(model.tokenizer.backend_tokenizer, embedding_dim=8)
    static = SentenceTransformer(modules=[module], device="cpu")
    static.save_pretrained(str(tmp_path / "static"))
    assert rt.check(model={"name": str(tmp_path / "static"), "device": "cpu"})["failed"] == []
    with pytest.raises(ValueError, match=r"model\.prompt has no effect: export copies the encoder as saved"):
        rt.export(model={"name": str(tmp_path / "static"), "prompt": "q: {text}"}, output=str(tmp_path / "out"))
    rt.export(model={"name": str(tmp_path / "static")}, output=str(tmp_path / "out"))
    models = [SentenceTransformer(str(tmp_path / name), device="cpu") for name in ("static", "out")]
    first, second = (each.encode(SENTENCES) for each in models)
    np.testing.assert_array_equal(first, second)
    made = {"model.name": str(tmp_path / "out"), "data.input": texts, "output": str(tmp_path / "e.npy")}
    assert rt.encode(**made)["sentences"] == len(SENTENCES)
    np.testing.assert_allclose(np.load(tmp_path / "e.npy"), first, atol=1e-6)
    pairs = write_pairs(tmp_path / "a.tsv")
    assert -100 <= rt.evaluate(**{"model.name": made["model.name"], "tasks": [pairs]})["average"] <= 100
    for loss in ("PearsonLoss", "InfoNCELoss"):
        keys = {"loss": loss, f"loss.mini_batch_{'size' if loss == 'PearsonLoss' else 'num_tokens'}": 4}
        rows = {"anchor": "sentence1", "positive": "sentence2", "relevance": "none"}
        keys |= {"data.columns": rows} if loss == "InfoNCELoss" else {}
        keys |= {"data.train": [pairs], "output": str(tmp_path / loss), "model.name": made["model.name"]}
        metrics = rt.train(training={"keep": 0.3, "learning_rate": 1.0, "max_steps": 4}, **keys)
        assert metrics["steps"] == 4 and metrics["keep"] == 0.3


@pytest.mark.parametrize("job", cli.JOBS)
def test_advice_names_a_setting_of_the_job(job):
    text = cli._explain(MemoryError("x"), job)
    named = [word[2:] for word in text.split() if word.startswith("--")]
    assert "smaller model" in text and {*named} <= {*cli.cfg.keys_of(cli.config_of(job))}


@pytest.mark.parametrize(("prompt", "ends"), [(None, False), ("{text} :", True)])
def test_last_token_pooling_without_an_end_token_is_said(tmp_path, encoder, caplog, prompt, ends):
    model = tiny_encoder(double=False)
    backend = model.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    model[0].processor = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    model.save_pretrained(str(tmp_path / "a"))
    for pooling in ("last", "mean"):
        caplog.clear()
        rt.load_encoder(str(tmp_path / "a"), device="cpu", pooling=pooling, prompt=prompt)
        warned = any("last word" in record.message for record in caplog.records)
        assert warned == (pooling == "last" and not ends)


@pytest.mark.parametrize("job", ["encode", "evaluate", "export", "mine", "train"])
def test_a_finished_output_says_how_to_repeat_the_work(tmp_path, encoder, texts, capsys, job):
    """Also with overwrite; doing so repeats it."""
    labelled = tmp_path / "rows.tsv"
    labelled.write_text("sentence\tlabel\n" + "".join(f"{text}\t{n % 2}\n" for n, text in enumerate(SENTENCES)))
    options = {
        "encode": {"data.input": texts, "output": str(tmp_path / "out.npy")},
        "evaluate": {"tasks": [write_pairs(tmp_path / "a.tsv")], "output": str(tmp_path / "out.json")},
        "export": {"output": str(tmp_path / "out")},
        "mine": {"data.input": str(labelled), "loss": "triplet", "output": str(tmp_path / "out.tsv"),
                 "mining.threshold": 0.0},
        "train": settings(tmp_path, **{"model.scratch": {}, "output": str(tmp_path / "run")}),
    }  # fmt: skip
    made = {**options[job], "model.name": encoder, "overwrite": True}
    target = Path(made["output"])
    for _ in range(2):
        rt.run(job, **made)
        assert "is finished" not in capsys.readouterr().out
        before = target.stat().st_ctime_ns
        rt.run(job, **made)
        text = f"{target} is already finished with these settings; to run the job again, remove it"
        assert target.stat().st_ctime_ns == before and text in capsys.readouterr().out
        outputs.remove(target)


@pytest.mark.parametrize("job", ["encode", "score", "mine", "mine rows", "evaluate"])
def test_a_prompt_with_a_condition_needs_one(tmp_path, encoder, job):
    """Without it, everything before the text would be left out."""
    file, prompt = tmp_path / "a.jsonl", "Given {condition}, {text} is"
    texts = [{"text": f"dog {n}", "label": n % 2, "split": "test" if n < 4 else "train"} for n in range(40)]
    others = {"score": [{"sentence1": "a dog", "sentence2": "a cat"}], "mine rows": [{"query": "a", "positive": "b"}]}
    rows = others.get(job, texts)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = {"model.name": encoder, "model.prompt": prompt, "data.input": str(file), "output": str(tmp_path / "a.npy")}
    if job == "score":
        teacher = {"teachers": [encoder, f"{encoder}/."], "teacher": {encoder: {"prompt": prompt}}}
        name = {**teacher, "data.input": str(file), "output": str(tmp_path / "a.tsv")}
    elif job.startswith("mine"):
        name |= {"output": str(tmp_path / "a.jsonl.gz")}
    elif job == "evaluate":
        reference = {"polarity.reference.name": encoder, "polarity.reference.prompt": prompt}
        name = {"model.name": encoder, **reference, "tasks": [f"polarity:{file}"]}
    with pytest.raises(ValueError, match=r"only the jobs train and evaluate support a prompt with \{condition\}"):
        rt.run(job.split()[0], None, **name)
