"""The public Trainer: what it chooses by the loss, and that the job `train` is the same."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as stock
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from transformers import set_seed

from benchmarks.studies.premise import PremiseBatchSampler
from raoe_train import evaluate_model, run
from raoe_train.data.columns import NLI_LABELS
from raoe_train.data.pairs import read_pairs
from raoe_train.losses import (
    ByLength,
    CoSENTLoss,
    InfoNCELoss,
    ListMLELoss,
    RankMarginLoss,
    RAOELoss,
    SigmoidLoss,
    SoftmaxLoss,
)
from raoe_train.losses.collators import ListCollator, RowCollator, ScoreLabelCollator
from raoe_train.settings import Training
from raoe_train.training.arguments import trainer_arguments
from raoe_train.training.trainer import Trainer
from tests.forked import together
from tests.outputs.test_processes import port
from tests.tiny import SENTENCES, saved_encoder, tiny_encoder
from tests.training.small_runs import arguments, write_pairs


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return saved_encoder(tmp_path_factory.mktemp("encoder"), dropout=0.1, prompt="query: {text}")


def pairs(path, **options):
    return read_pairs(write_pairs(path, **options))


@pytest.mark.parametrize(("dims", "mini_batch_size"), [(None, None), ([16, 4], 3)])
def test_script_and_recipe_give_equal_weights(tmp_path, encoder, dims, mini_batch_size):
    """RAOELoss on two sources: the same weights, bit for bit."""
    sources = [write_pairs(tmp_path / "a.tsv"), write_pairs(tmp_path / "b.tsv", rows=24, scale=1.0)]
    made = run("train", None, **{
        "model.name": encoder, "model.device": "cpu", "data.train": sources, "output": str(tmp_path / "out"),
        "loss": {"scale": 5, "mini_batch_size": mini_batch_size, "matryoshka_dims": dims or []},
        "training": {"num_train_epochs": 1, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "seed": 7},
    })  # fmt: skip
    set_seed(7)
    model = SentenceTransformer(encoder, device="cpu")
    datasets = DatasetDict({name: read_pairs(source) for name, source in zip("ab", sources, strict=True)})
    loss = RAOELoss(model, scale=5, mini_batch_size=mini_batch_size, matryoshka_dims=dims or [])
    args = arguments(tmp_path)
    trainer = Trainer(model, args, datasets, loss=loss)
    assert trainer.scales == made["scale"] == {"a": 5.0, "b": 5.0}
    assert args.prompts is None and trainer.args.prompts == "query: "  # the encoder's own, and args stay as they are
    trainer.train()
    model.save_pretrained(str(tmp_path / "script"))
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "script"))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_each_loss_has_its_batches(tmp_path, encoder):
    model, data = SentenceTransformer(encoder, device="cpu"), pairs(tmp_path / "a.tsv")

    def collator(loss, **options):
        chosen = Trainer(model, arguments(tmp_path), data, loss=loss, **options).data_collator
        assert chosen.prompts == "query: "
        return type(chosen)

    assert collator(RAOELoss(model)) is ScoreLabelCollator
    assert collator(stock.MatryoshkaLoss(model, ListMLELoss(model), [8])) is ListCollator
    assert collator(InfoNCELoss(model)) is collator(stock.CoSENTLoss(model)) is RowCollator
    assert collator(lambda model: RAOELoss(model)) is ScoreLabelCollator
    assert collator(None) is RowCollator
    for by_length in (True, False):
        trainer = Trainer(model, arguments(tmp_path), data, loss=RAOELoss(model), by_length=by_length)
        assert isinstance(trainer.computed_loss(), ByLength) == by_length
    mine = SentenceTransformerDataCollator(preprocess_fn=model.preprocess, prompts="query: ")
    assert collator(RAOELoss(model), data_collator=mine) is SentenceTransformerDataCollator


@pytest.mark.parametrize("loss", [RAOELoss, InfoNCELoss, stock.CoSENTLoss])
def test_padded_batches_train_as_batches_by_length(tmp_path, encoder, loss):
    """In float64, with SGD and without dropout, to rounding."""
    weights = []
    for by_length in (True, False):
        model = SentenceTransformer(encoder, device="cpu").double()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        data = pairs(tmp_path / "a.tsv")
        if loss is not RAOELoss:
            data = data.select_columns(["sentence1", "sentence2", *(["score"] if loss is stock.CoSENTLoss else [])])
        Trainer(model, arguments(tmp_path, optim="sgd"), data, loss=loss(model), by_length=by_length).train()
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    start = SentenceTransformer(encoder, device="cpu").double()
    assert (weights[0] - torch.cat([weight.detach().flatten() for weight in start.parameters()])).abs().max() > 1e-6
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-10)


def test_a_finished_run_that_resumes_trains_no_more(tmp_path, encoder):
    """Its last step is in the middle of an epoch."""
    data, weights = pairs(tmp_path / "a.tsv"), []
    for resume in (False, True):
        model = SentenceTransformer(encoder, device="cpu")
        trainer = Trainer(model, arguments(tmp_path, max_steps=3, save_strategy="steps"), data, loss=RAOELoss(model))
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 3
        weights.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]))
    assert torch.equal(*weights)


def test_a_loss_for_each_dataset(tmp_path, encoder):
    model = SentenceTransformer(encoder, device="cpu")
    scored = pairs(tmp_path / "a.tsv")
    alone = scored.select_columns(["sentence1", "sentence2"])
    datasets = DatasetDict(scored=scored, alone=alone)
    losses = {"scored": RAOELoss(model), "alone": InfoNCELoss(model, 30.0)}
    trainer = Trainer(model, arguments(tmp_path, max_steps=4), datasets, loss=losses)
    assert isinstance(trainer.data_collator, ScoreLabelCollator)
    assert trainer.scales == {"alone": 30.0, "scored": 20.0}
    trainer.train()
    with pytest.raises(ValueError, match="need different collators, ListCollator and ScoreLabelCollator"):
        Trainer(model, arguments(tmp_path), datasets, loss={**losses, "alone": ListMLELoss(model)})


@pytest.mark.parametrize("mini_batch_size", [None, 3])
def test_learned_scale_is_trained(tmp_path, encoder, mini_batch_size):
    """It is in the optimizer, at its own learning rate where it has one, and is not decayed; as the bias is."""
    model, data = SentenceTransformer(encoder, device="cpu"), pairs(tmp_path / "a.tsv")
    loss = SigmoidLoss(model, 20.0, mini_batch_size=mini_batch_size)
    names = dict.fromkeys(("log_scale", "logit_bias"), 0.05)
    args = arguments(tmp_path, max_steps=3, weight_decay=0.5, learning_rate_mapping=names)
    trainer = Trainer(model, args, data.select_columns(["sentence1", "sentence2"]), loss=loss)
    assert trainer.scales == {"train": pytest.approx(20.0)}
    trainer.train()
    for name in names:
        parameter = getattr(loss, name)
        group = next(g for g in trainer.optimizer.param_groups if any(p is parameter for p in g["params"]))
        assert (group["initial_lr"], group["weight_decay"]) == (0.05, 0.0)
    # Adam's first step is the learning rate, whatever the gradient
    assert trainer.scales["train"] == loss.current_scale and abs(loss.current_scale / 20 - 1) > 0.05
    assert abs(loss.logit_bias.item() + 10) > 0.05


def test_pairs_of_a_premise_share_a_batch(tmp_path):
    path = tmp_path / "nli.tsv"
    rows = [f"premise {number % 40}\thypothesis {number}\t0.{number}" for number in range(120)]
    path.write_text("\n".join(["sentence1\tsentence2\tscore", *rows]) + "\n")
    data = read_pairs(path)
    sampler = PremiseBatchSampler(data, 30, False, generator=torch.Generator(), seed=3, valid_label_columns=["score"])
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert (
            sorted(row for batch in batches for row in batch) == list(range(120)) and len(batches) == len(sampler) == 4
        )
        assert all(len({row % 40 for row in batch}) == 10 for batch in batches)
        orders.append(batches)
    assert orders[0] != orders[1]
    training = Training(batch_sampler="benchmarks.studies.premise.PremiseBatchSampler")
    settings = trainer_arguments(training, tmp_path, device="cpu", has_dev=False)
    assert settings["batch_sampler"] is PremiseBatchSampler


@pytest.mark.parametrize("units, expected", [({}, False), ({"avx512_bf16": True}, True), ({"amx_bf16": True}, True)])
def test_bf16_auto_needs_cpu_support(monkeypatch, tmp_path, units, expected):
    known = {"avx512": True, "avx512_bf16": False, "amx_bf16": False} | units
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)  # torch 2.6 has none
    settings = trainer_arguments(Training(bf16="auto"), tmp_path, device="cpu", has_dev=False)
    assert settings["bf16"] is expected and settings["use_cpu"]
    assert trainer_arguments(Training(bf16=True), tmp_path, device="cpu", has_dev=False)["bf16"] is True


def test_packed_auto_needs_one_gpu_and_triton(tmp_path, encoder, monkeypatch):
    usable: dict[str, Any] = {"bidirectional_attention": {"triton": True}}
    monkeypatch.setattr("raoe_train.encoders.packed.backends", lambda device: usable)
    model = SentenceTransformer(encoder, device="cpu")
    trainer = Trainer(model, arguments(tmp_path), pairs(tmp_path / "a.tsv"), loss=RAOELoss(model))
    cases = [("cpu", 0, True, False), ("cuda", 1, True, True), ("cuda", 1, "no", False), ("cuda", 2, True, False)]
    for kind, gpus, triton, expected in cases:
        usable["bidirectional_attention"]["triton"] = triton
        args = {"device": torch.device(kind), "n_gpu": gpus, "torch_compile": False, "bf16": False, "fp16": False}
        trainer.args = SimpleNamespace(**args, tf32=None)
        model[0].model.config._attn_implementation = "sdpa"
        loss = trainer.wrap_loss(RAOELoss(model))
        columns = [model.preprocess(["a dog", "the cat sleeps"])] * 2
        plan = loss.plan(columns, {"score": torch.zeros(2), "label": torch.zeros(2)})
        assert ("cu_seq_lens_q" in plan.runs[0]) == expected
    trainer.packed = True
    with pytest.raises(ValueError, match="packed needs one process per GPU: start training with torchrun"):
        trainer.wrap_loss(RAOELoss(model))


def test_labels_are_read_by_class_name(tmp_path, encoder):
    """A ClassLabel column may number entailment, neutral and contradiction in any order."""
    data, names = pairs(tmp_path / "a.tsv"), ["contradiction", "entailment", "neutral"]
    numbered = [names.index([*NLI_LABELS][label]) for label in data["label"]]
    classes = ClassLabel(names=names)
    named = data.remove_columns("label").add_column("label", numbered).cast_column("label", classes)
    model = SentenceTransformer(encoder, device="cpu")
    for inputs in (named, DatasetDict({"a": named}), named.to_iterable_dataset()):
        trainer = Trainer(model, arguments(tmp_path, max_steps=1), inputs, loss=RAOELoss(model))
        result = trainer.train_dataset["a"] if isinstance(inputs, DatasetDict) else trainer.train_dataset
        assert [row["label"] for row in result] == data["label"][:]


def test_a_missing_score_is_said(tmp_path, encoder):
    model = SentenceTransformer(encoder, device="cpu")
    with pytest.raises(ValueError, match="requires specifying a train_dataset"):
        Trainer(model, arguments(tmp_path), None, loss=RankMarginLoss(model)).train()
    data = Dataset.from_dict({"sentence1": SENTENCES, "sentence2": SENTENCES[::-1], "score": [None, *range(10)]})
    with pytest.raises(ValueError, match=r"score.* None"):
        Trainer(model, arguments(tmp_path), data, loss=RankMarginLoss(model)).train()
    data = data.remove_columns("score").add_column("label", [None, *[0, 1] * 5])
    with pytest.raises(ValueError, match=r"a row has no label \(None\)"):
        Trainer(model, arguments(tmp_path), data, loss=RankMarginLoss(model)).train()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_an_encoder_without_cosines_is_said(tmp_path, caplog, similarity):
    model = SentenceTransformer(modules=[*tiny_encoder(double=False)], device="cpu", similarity_fn_name=similarity)
    Trainer(model, arguments(tmp_path), Dataset.from_dict(ROWS), loss=InfoNCELoss(model))
    evaluate_model(model, tasks=["builtin#dev"])
    assert caplog.text.count("the encoder's similarity function is dot, but raoe") == 2 * (similarity == "dot")


ROWS = {"anchor": ["a dog", "a train", "a man"], "positive": ["the dog", "the train", "dinner"],
        "negative": ["snow", "music", "birds"]}  # fmt: skip


@pytest.mark.parametrize("own, query, document", [
    ({"query": "query: ", "document": "passage: "}, "query: ", "passage: "),
    ({"query": "query: ", "corpus": "a text: "}, "query: ", "a text: "),
    ({"query": "query: ", "default": "text: "}, "query: ", "text: "),
    ({"default": "text: "}, "text: ", "text: "),
    ({}, "", ""),
])  # fmt: skip
@pytest.mark.parametrize("first", ["anchor", "question", "sentence1"])
def test_prompts_by_column(tmp_path, capsys, own, query, document, first):
    """Those of the model, for queries and for documents, in columns of rows; else its default prompt."""
    model = tiny_encoder(double=False)
    model.prompts, model.default_prompt_name = own, "default" if "default" in own else None
    rows = {first: ROWS["anchor"], "positive": ROWS["positive"], "negative": ROWS["negative"]}
    if first == "sentence1":
        query = document = own.get("default", "")
    trainer = Trainer(model, arguments(tmp_path), Dataset.from_dict(rows), loss=InfoNCELoss(model))
    batch = trainer.data_collator([{name: texts[n] for name, texts in rows.items()} for n in range(3)])
    for name, texts in rows.items():
        prompt = query if name == first else document
        expected = model.tokenizer([prompt + text for text in texts], padding=True)["input_ids"]
        assert batch[f"{name}_input_ids"].tolist() == expected
    said = f"the encoder's own prompts are used: {query!r} for {first}, {document!r} for other columns\n"
    unused = f"the encoder's prompts for queries and documents are not used: {first} is not a query column"
    printed = capsys.readouterr().out
    if first == "sentence1" and "query" in own:
        assert printed.startswith(unused)
    else:
        default = f"the encoder's default prompt is added to all texts: {query!r}\n" if query else ""
        assert printed == (said if query != document else default)


def train_in_a_group(rank: int, world: int, encoder: str, folder: str, at: str) -> None:
    """Save the weights of an encoder and its losses after steps of 8 rows: four on two datasets, two on a stream."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": at}
    torch.set_num_threads(1)
    model = SentenceTransformer(encoder, device="cpu")
    texts = {"sentence1": SENTENCES + SENTENCES[:9], "sentence2": [*reversed(SENTENCES), *SENTENCES[:9]]}
    scored = Dataset.from_dict({**texts, "score": [n / 19 for n in range(20)]})
    labelled = Dataset.from_dict({**texts, "label": [n % 3 for n in range(20)]})
    torch.manual_seed(rank)  # the classifiers of the processes differ until training starts
    losses = {"a": CoSENTLoss(model, scale=5.0, gather_across_devices=True), "b": SoftmaxLoss(model)}
    sizes = {"per_device_train_batch_size": 8 // world, "per_device_eval_batch_size": 4 // world}
    args = arguments(Path(folder), **sizes, optim="sgd", learning_rate=0.1,
                     lr_scheduler_type="constant", dataloader_drop_last=True)  # fmt: skip
    trainer = Trainer(model, args, data := {"a": scored, "b": labelled}, data, losses, packed=True)
    before = trainer.evaluate()  # accelerate prepares the model here, without DistributedDataParallel
    trainer.train()
    stream = scored.with_format(None).to_iterable_dataset()
    args.max_steps = 2
    Trainer(model, args, stream, loss=losses["a"]).train()
    assert trainer.args.per_device_train_batch_size == 8 // world
    weights = {f"{name}.{key}": value for name, loss in losses.items() for key, value in loss.state_dict().items()}
    weights |= {"before": torch.tensor(before["eval_b_loss"])}
    torch.save(weights, f"{folder}/weights{world}-{rank}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_of_processes_equals_one(tmp_path):
    encoder = saved_encoder(tmp_path, dropout=0.0)
    for world in (1, 2):
        together(train_in_a_group, world, encoder, str(tmp_path), port())
    one, *others = (torch.load(tmp_path / f"weights{name}") for name in ("1-0", "2-0", "2-1"))
    assert any("classifier" in name for name in one)
    for other in others:
        torch.testing.assert_close(other, one, atol=1e-6, rtol=0)


def resume_in_a_group(rank: int, world: int, encoder: str, folder: str, at: str) -> None:
    """Train two epochs of five steps, resume from the seventh step, and compare the weights."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": at}
    torch.set_num_threads(1)
    texts = {"sentence1": SENTENCES + SENTENCES[:9], "sentence2": [*reversed(SENTENCES), *SENTENCES[:9]]}
    rows = Dataset.from_dict({**texts, "score": [n / 19 for n in range(20)]})
    data = {"a": rows.select(range(12)), "b": rows.select(range(12, 20))}
    steps = {"save_strategy": "steps", "save_steps": 7, "num_train_epochs": 2, "per_device_train_batch_size": 2}
    ends = []
    for checkpoint in (None, f"{folder}/checkpoints/checkpoint-7"):
        model = SentenceTransformer(encoder, device="cpu")
        loss = CoSENTLoss(model, scale=5.0, gather_across_devices=True)
        args = arguments(Path(folder), **steps, optim="sgd", learning_rate=0.1, dataloader_drop_last=True)
        Trainer(model, args, data, loss=loss).train(resume_from_checkpoint=checkpoint)
        ends.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(ends[1], ends[0], atol=1e-7, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_of_processes_resumes_within_an_epoch(tmp_path):
    """In the order of this epoch. accelerate does not pass the epoch to the sampler in the skipped rows' wrapper."""
    together(resume_in_a_group, 2, saved_encoder(tmp_path, dropout=0.0), str(tmp_path), port())


@pytest.mark.parametrize("kind", ["dataset", "mapping", "stream"])
def test_too_few_rows_for_a_batch_are_an_error(tmp_path, kind):
    model = tiny_encoder(double=False)
    texts = {"sentence1": SENTENCES[:5], "sentence2": SENTENCES[5:10]}
    rows = Dataset.from_dict({**texts, "score": [0.1 * n for n in range(5)]})
    data = {"dataset": rows, "mapping": {"b": rows}, "stream": rows.to_iterable_dataset()}[kind]
    args = arguments(tmp_path, dataloader_drop_last=True, max_steps=2)
    few = "has 5 rows, fewer than a batch of 8"
    none = "nothing was trained: the stream has fewer rows than one batch"
    problem = {"dataset": f"train {few}", "mapping": f"b {few}", "stream": none}[kind]
    trainer = Trainer(model, args, data, rows, CoSENTLoss(model))
    with pytest.raises(ValueError, match=problem):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0  # no row of an evaluation is left out


@pytest.mark.parametrize(("settings", "searches"), [({"packed": True}, False), ({"packed": False}, True)])
def test_ddp_searches_no_unused_weights_of_packed_models(tmp_path, settings, searches):
    model = tiny_encoder(double=False)
    rows = Dataset.from_dict({"sentence1": SENTENCES, "sentence2": SENTENCES[::-1], "score": [*range(len(SENTENCES))]})
    trainer = Trainer(model, arguments(tmp_path), rows, loss=CoSENTLoss(model), **settings)
    assert trainer.accelerator.ddp_handler.find_unused_parameters == searches
    assert len(getattr(model, "_ddp_params_and_buffers_to_ignore", [])) == (0 if searches else 2)
    asked = arguments(tmp_path, ddp_find_unused_parameters=True)
    trainer = Trainer(model, asked, rows, loss=CoSENTLoss(model), **settings)
    assert trainer.accelerator.ddp_handler.find_unused_parameters
