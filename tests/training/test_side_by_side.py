"""rt.Trainer does what sentence-transformers' own trainer does: the same calls through both give the same results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from datasets import ClassLabel, Dataset, IterableDatasetDict
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.base.sampler import GroupByLabelBatchSampler, NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
    SoftmaxLoss,
    TripletLoss,
)
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import raoe_train as rt
from tests.tiny import SENTENCES, tiny_encoder

TRAINERS = (SentenceTransformerTrainer, rt.Trainer)
TIMES = ("runtime", "per_second", "total_flos")


def rows(*names: str, count: int = 9, shift: int = 0, **columns: Any) -> Dataset:
    """A dataset with columns of sentences, all of which differ in each row."""
    texts = {name: [SENTENCES[(n + 3 * k + shift) % 11] for n in range(count)] for k, name in enumerate(names)}
    return Dataset.from_dict(texts | columns)


def scored(shift: int = 0) -> Dataset:
    return rows("sentence1", "sentence2", shift=shift, score=[n / 9 for n in range(9)])


def made(trainer: Any, folder: Any, loss: Any, data: Any, options: dict[str, Any] = {}, **others: Any) -> Any:  # noqa: B006
    """A trainer with an encoder of its own. The loss and the data are given as functions (of the encoder)."""
    sizes = {"max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1}
    args = Arguments(str(folder), use_cpu=True, report_to="none", **{"disable_tqdm": True, **sizes, **options})
    torch.manual_seed(0)
    model = others.pop("model", None) or tiny_encoder()
    losses = {name: each(model) for name, each in loss.items()} if isinstance(loss, dict) else loss(model)
    return trainer(model, args, data(), loss=losses, **{key: each() for key, each in others.items()})


def outcome(trainer: Any) -> dict[str, Any]:
    """What a user sees of a training: metrics, log, weights; and what an evaluation of other rows returns."""
    result = trainer.train()
    metrics: dict[str, Any] = {"train": result.metrics, "log": trainer.state.log_history}
    if trainer.eval_dataset is not None:
        metrics["eval"] = trainer.evaluate()
    return {"metrics": without_times(metrics), "weights": [each.detach() for each in trainer.model.parameters()]}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if not key.endswith(TIMES)}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def equal(theirs: Any, ours: Any) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4, check_dtype=False)  # the log rounds to 4 digits


def cosine(model: Any) -> Any:
    return CosineSimilarityLoss(model)


def ranking(model: Any) -> Any:
    return MultipleNegativesRankingLoss(model)


def upper(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: [text.upper() if isinstance(text, str) else text for text in texts] for name, texts in batch.items()}


def transformed() -> Dataset:
    data = scored()
    data.set_transform(upper)
    return data


def pairs() -> Dataset:
    return scored().remove_columns("score")


def two(make: Any = scored, kind: Any = dict) -> Any:
    return kind({"a": make(), "b": make()})


def stream() -> Any:
    return scored().to_iterable_dataset()


def sampler(*data: Any, **form: Any) -> Any:
    return NoDuplicatesBatchSampler(*data, **form)


PROMPTS = (
    "text: ", {"a": "first: ", "b": "second: "}, {"sentence1": "query: ", "sentence2": "text: "},
    {"a": {"sentence1": "query: ", "sentence2": "text: "}, "b": {"sentence1": "q: ", "sentence2": "t: "}},
)  # fmt: skip
EPOCHS = {"eval_strategy": "steps", "eval_steps": 2}
CASES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "one set": (cosine, scored, EPOCHS, {"eval_dataset": scored}),
    "evaluation of two": (cosine, scored, EPOCHS, {"eval_dataset": two}),
    "two sets": (cosine, two, EPOCHS, {"eval_dataset": two}),
    "two losses": ({"a": cosine, "b": ranking}, lambda: {"a": scored(), "b": pairs()}, EPOCHS,
                   {"eval_dataset": lambda: {"a": scored(1), "b": pairs()}}),
    "stream": (cosine, stream, EPOCHS, {"eval_dataset": stream}),
    "streams to evaluate": (cosine, scored, EPOCHS, {"eval_dataset": lambda: two(stream)}),
    "a dict of streams": (cosine, scored, EPOCHS, {"eval_dataset": lambda: two(stream, IterableDatasetDict)}),
    "streams to train": (cosine, lambda: two(stream), {}, {}),
    "transform": (cosine, transformed, EPOCHS, {"eval_dataset": transformed}),
    "transforms": (cosine, lambda: two(transformed), {"prompts": PROMPTS[1]}, {}),
    "evaluator": (cosine, scored, EPOCHS, {"evaluator": lambda: EmbeddingSimilarityEvaluator(
        SENTENCES, SENTENCES[::-1], [*range(11)])}),
    "no evaluation": (cosine, scored, {"eval_strategy": "steps"}, {}),
    "one loss of two": ({"a": cosine}, two, {}, {}),
    "reserved column": (cosine, lambda: scored().rename_column("sentence2", "return_loss"), {}, {}),
    "group by label": (cosine, lambda: rows("x", "y", label=[0, 1, 2] * 3), {"batch_sampler": GroupByLabelBatchSampler},
                       {}),
    "no duplicates": (ranking, pairs, {"batch_sampler": NoDuplicatesBatchSampler}, {}),
    "function as sampler": (ranking, pairs, {"batch_sampler": sampler}, {}),
    "proportional": (cosine, two, {"multi_dataset_batch_sampler": "proportional"}, {}),
    "round robin": (cosine, two, {"multi_dataset_batch_sampler": "round_robin"}, {}),
    "last batch dropped": (cosine, scored, {"dataloader_drop_last": True}, {}),
    "accumulation": (cosine, scored, {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}, {}),
    "positive first": (ranking, lambda: rows("positive", "anchor"), EPOCHS,
                       {"eval_dataset": lambda: rows("positive", "anchor", shift=2)}),
    "context": (TripletLoss, lambda: rows("question", "context", "answer"), EPOCHS,
                {"eval_dataset": lambda: rows("question", "context", "answer", shift=2)}),
    "negative second": (TripletLoss, lambda: rows("query", "negative", "positive"), {}, {}),
    "numbers backwards": (TripletLoss, lambda: rows("sentence2", "sentence1", "sentence0"), {}, {}),
    "plain pos and neg": (TripletLoss, lambda: rows("query", "pos", "neg"), {}, {}),
    "classes": (lambda model: SoftmaxLoss(model, 16, 3), lambda: rows("premise", "hypothesis", label=[0, 1, 2] * 3)
                .cast_column("label", ClassLabel(names=["contradiction", "neutral", "entailment"])), {}, {}),
}  # fmt: skip
for number, prompts in enumerate(PROMPTS):
    CASES[f"prompts {number}, one set"] = (ranking, pairs, {"prompts": prompts}, {"eval_dataset": lambda: two(pairs)})
    CASES[f"prompts {number}, two sets"] = (ranking, lambda: two(pairs), {"prompts": prompts}, {})


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_trainers_give_the_same(tmp_path, case):
    loss, data, options, others = CASES[case]
    results: list[Any] = []
    for trainer in TRAINERS:
        try:
            results.append(outcome(made(trainer, tmp_path, loss, data, options, **others)))
        except ValueError as error:
            results.append(str(error).replace("SentenceTransformerTrainer", "Trainer"))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        equal(*results)


@pytest.mark.parametrize(
    "names", [("positive", "anchor"), ("question", "context", "answer"), ("sentence2", "sentence1")]
)
@pytest.mark.parametrize("is_ours", [False, True])
def test_each_way_into_the_trainer_reads_the_columns_alike(tmp_path, capsys, names, is_ours):
    """Losses of sentence-transformers read columns by position, raoe's by name. A printed line says so."""
    make = (lambda model: rt.losses.InfoNCELoss(model)) if is_ours else ranking
    values, data = set(), rows(*names)
    for trainer in TRAINERS[is_ours:]:
        one = made(trainer, tmp_path, make, lambda: data, eval_dataset=lambda: rows(*names))
        ways = [one.evaluate()["eval_loss"], one.evaluate(data)["eval_loss"], one.predict(data).metrics["test_loss"]]
        ways += [one.evaluate({"x": data})["eval_x_loss"]]
        ways += [one.evaluate(data.to_pandas())["eval_loss"]] if trainer is rt.Trainer else []
        values |= {round(value, 9) for value in ways}
    assert len(values) == 1
    order = {"positive": "anchor, positive", "question": "question, answer, context"}.get(names[0])
    said = "columns were matched by name and reordered for the loss: "
    assert (said in capsys.readouterr().out) == (is_ours and order is not None)


def test_all_rows_are_evaluated_and_predicted(tmp_path):
    data = rows("a", "b", count=9, score=[n / 9 for n in range(9)])
    trainer = made(rt.Trainer, tmp_path, cosine, scored, {"dataloader_drop_last": True}, eval_dataset=lambda: data)
    whole = made(SentenceTransformerTrainer, tmp_path, cosine, scored, eval_dataset=lambda: data).evaluate()[
        "eval_loss"
    ]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(whole, abs=1e-9)
    assert trainer.predict(data).metrics["test_loss"] == pytest.approx(whole, abs=1e-9)


class Changing(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        logs["added"] = 1.0


class Logging:
    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        logs["x_per_second"] = 0.0
        super().log(logs, *arguments)  # type: ignore[misc]


@pytest.mark.parametrize("quiet", [False, True])
def test_the_log_is_that_of_sentence_transformers(tmp_path, quiet):
    """Metrics have the epoch, callbacks may add values, and values of 0 stay."""
    keys = []
    for trainer in TRAINERS:
        kind = type("Sub", (Logging, trainer), {})
        one = made(kind, tmp_path, cosine, scored, {**EPOCHS, "disable_tqdm": quiet}, eval_dataset=scored)
        one.add_callback(Changing())
        metrics = one.train().metrics
        keys.append([sorted(metrics), sorted(one.evaluate()), [sorted(each) for each in one.state.log_history]])
    assert keys[0] == keys[1]
    assert {"epoch", "added", "x_per_second"} <= {*keys[1][0]}


def test_a_subclass_of_their_trainer_becomes_one_of_ours(tmp_path):
    """It reads features in compute_loss, its loss is the loss that was given, and all arguments may be positional."""
    losses = []
    for trainer in TRAINERS:
        calls: list[Any] = []

        class Mine(trainer):  # type: ignore[misc, valid-type]
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **form: Any) -> Any:
                features, labels = self.collect_features(inputs)
                calls.append([sorted(inputs), [each["input_ids"].shape for each in features], labels is None])  # noqa: B023
                loss = self.loss(features, labels)
                loss = loss + super().compute_loss(model, dict(inputs), **form)
                return (loss, {}) if return_outputs else loss

        args = Arguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
        torch.manual_seed(0)
        model = tiny_encoder()
        loss = ranking(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        one = Mine(
            model, args, pairs(), pairs(), loss, None, None, None, None, None, [Changing()], (optimizer, schedule)
        )
        assert one.optimizer is optimizer and any(isinstance(each, Changing) for each in one.callback_handler.callbacks)
        assert one.loss is loss and one.loss.scale == 20
        result = one.train()
        losses.append([result.training_loss, one.evaluate()["eval_loss"], calls, [*model.parameters()]])
    assert losses[0][2] == losses[1][2]
    equal([losses[0][:2], losses[0][3]], [losses[1][:2], losses[1][3]])


def test_a_part_of_the_loss_that_would_be_left_out_is_refused(tmp_path):
    kind = type("Sub", (rt.Trainer,), {"compute_loss": lambda self, *inputs, **form: 0})
    with pytest.raises(ValueError, match="Sub overrides compute_loss, so keep would have no effect"):
        kind(tiny_encoder(), Arguments(str(tmp_path), use_cpu=True), scored(), loss=cosine, keep=1.0)


@pytest.mark.parametrize("quiet", [False, True])
def test_the_log_lines_are_the_callback_of_transformers(tmp_path, capsys, quiet):
    usual = PrinterCallback if quiet else ProgressCallback
    for way in ("pop_callback", "remove_callback"):
        trainer = made(rt.Trainer, tmp_path, cosine, scored, {"disable_tqdm": quiet})
        removed = getattr(trainer, way)(usual)
        assert isinstance(removed, usual) or way == "remove_callback"
        capsys.readouterr()
        trainer.train()
        assert "step 1/4" not in capsys.readouterr().out
    made(rt.Trainer, tmp_path, cosine, scored, {"disable_tqdm": quiet}).train()
    assert ("step 1/4  loss " in capsys.readouterr().out) == quiet  # else transformers' progress bar


def test_loaders_are_planned_once(tmp_path):
    options = {"dataloader_persistent_workers": True, "dataloader_num_workers": 1}
    trainer = made(rt.Trainer, tmp_path, cosine, scored, options, eval_dataset=lambda: two())
    loaders = [trainer.get_eval_dataloader("a") for _ in range(2)]
    inner = [getattr(each, "base_dataloader", each).collate_fn for each in loaders]
    assert inner[0] is inner[1] and not hasattr(inner[1].collate, "collate")


def test_the_card_names_the_loss_and_the_columns_as_they_are_trained(tmp_path):
    data = rows("anchor", "positive")
    data.set_transform(lambda rows: {"question": rows["anchor"], "answer": [text.upper() for text in rows["positive"]]})
    cards = []
    for trainer in TRAINERS:
        one = made(trainer, tmp_path, ranking, lambda: copy.copy(data))
        cards.append(one.model.model_card_data.to_dict())
        text = one.model._create_model_card(str(tmp_path)) or (tmp_path / "README.md").read_text(encoding="utf-8")
        assert "loss:MultipleNegativesRankingLoss" in text and "ByLength" not in text
        assert "<code>question</code>" in text and SENTENCES[3].upper() in text
    assert cards[0]["train_datasets"] == cards[1]["train_datasets"] and cards[0]["tags"] == cards[1]["tags"]


def test_a_dataset_of_an_earlier_trainer_is_read_as_the_new_loss_reads_it(tmp_path):
    """Two trainers use the same objects, first with a loss that reads by position, then with one that reads by name."""
    data = {"a": rows("positive", "anchor"), "b": rows("positive", "anchor")}
    prompts = {"a": "first: ", "b": "second: "}
    made(rt.Trainer, tmp_path, ranking, lambda: data, {"prompts": prompts}).train()
    assert all(each.format["type"] is None for each in data.values())
    again = made(rt.Trainer, tmp_path, rt.losses.InfoNCELoss, lambda: data, {"prompts": prompts})
    assert [*again.train_dataset["a"][:1]] == ["anchor", "positive", "dataset_name"]
    again.train()
