"""FSDP 2 over gloo: losses with gathering and cached gradients, rt.Trainer, and the job train.

FSDP 1 cannot be tried without a GPU: torch (2.13) says that it "needs a non-CPU accelerator device".
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.multiprocessing import ProcessExitedException

import raoe_train as rt
from raoe_train.encoders import lengths
from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
from raoe_train.jobs.train_settings import check_config
from raoe_train.losses import ByLength, CoSENTLoss, InfoNCELoss, ListMLELoss, RAOELoss, SoftmaxLoss
from raoe_train.training.callbacks import LogFile
from tests.forked import together
from tests.losses.test_global_batch import RATE, REPLAYS_IN_DOUBLE, TOLERANCE, cases, packed_rows, packing, step
from tests.outputs.test_processes import port
from tests.tiny import SENTENCES, encoder_of, load, saved_encoder, tiny_encoder, total
from tests.training.small_runs import arguments, settings


def shard_on_cpu() -> None:
    """Let accelerate shard on a CPU, where it would ignore the plugin and wrap in DistributedDataParallel."""
    own = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        own(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None:
            PartialState().distributed_type = self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init  # type: ignore[method-assign]


def sharding_accelerator() -> Any:
    shard_on_cpu()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BertLayer"],
        cpu_ram_efficient_loading=False,
    )
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def sharded_steps(rank: int, world: int, folder: str) -> None:
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    lengths.CPU_FORWARD = 1  # by length, processes would make different numbers of forwards
    plain = {dtype: tiny_encoder(double=dtype == torch.float64) for dtype in TOLERANCE}
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    accelerator = sharding_accelerator()
    away: dict[str, float] = {}
    for dtype, model in plain.items():
        initial = copy.deepcopy(model.state_dict())
        names = [name for name, _ in model.named_parameters()]
        seen = set()
        for made, keywords, whole, parts in cases(model, world):
            if made not in (RAOELoss, InfoNCELoss, ListMLELoss) or made in seen:
                continue
            seen.add(made)
            _, expected = step(made(model, **keywords), model, initial, *whole)
            model.load_state_dict(initial)
            # Sharded layers are gathered in every forward, so processes need as many mini-batches: 7 and 12 sentences
            # make two each of 6.
            pieces = 6 if made is ListMLELoss else 2
            for mini_batch_size, around in itertools.product((None, pieces), (None, ByLength, packing)):
                sharded = copy.deepcopy(model)
                sharded, optimiser = accelerator.prepare(sharded, torch.optim.SGD(sharded.parameters(), lr=RATE))
                assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
                loss = made(sharded, **keywords, mini_batch_size=mini_batch_size, gather_across_devices=True)
                loss = loss if around is None else around(loss)
                features, labels = parts[rank]
                accelerator.backward(total(loss(copy.deepcopy(features), labels)))
                optimiser.step()
                full = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
                after = torch.cat([full[name].flatten() for name in names]).double()
                exact = mini_batch_size is None or REPLAYS_IN_DOUBLE
                limit = TOLERANCE[dtype if exact else torch.float32]
                name = f"{made.__name__} {mini_batch_size} {getattr(around, '__name__', None)} {dtype}"
                assert (packed_rows(loss, parts[rank]) > 0) == (around is packing)
                away[name] = float((after - expected).abs().max()) / limit
    assert len(away) == 36, away
    assert max(away.values()) <= 1, {name: value for name, value in away.items() if not value <= 1}
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_steps_equal_unsharded_steps(tmp_path):
    together(sharded_steps, 2, str(tmp_path))


def in_group(rank: int, world: int, at: str) -> None:
    """Let this process be one of torchrun's."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": at}
    torch.set_num_threads(1)


PAIRS = {"sentence1": SENTENCES + SENTENCES[:7], "sentence2": [*reversed(SENTENCES), *SENTENCES[:7]]}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FORMS: dict[str, dict[str, Any]] = {
    "by length": {},
    "packed": {"packed": True},
    "padded": {"by_length": False},
    "cached": {"loss": {"mini_batch_size": 4}},
    "keep": {"keep": 0.3},
    "checkpointing": {"arguments": {"gradient_checkpointing": True}},
    "rows": {},
    "bidirectional": {},
}


def steps_of_trainer(rank: int, world: int, folder: str, at: str) -> None:
    """Save the weights of each form after five steps of six rows."""
    models = {form: tiny_encoder() for form in FORMS} | {"bidirectional": encoder_of("llama", SIZES).train()}
    decoder = models["bidirectional"][0]
    decoder.model = BidirectionalModel.around(decoder.model, 1)
    in_group(rank, world, at)
    shard_on_cpu()
    is_sharded, after = world > 1, {}
    lengths.CPU_FORWARD = 1
    for form, changes in FORMS.items():
        model = models[form]
        if form == "rows":
            data = {"anchor": PAIRS["sentence1"], "positive": PAIRS["sentence2"]}
            loss: Any = InfoNCELoss(model, gather_across_devices=True)
        else:
            data = PAIRS | {"score": [row / 17 for row in range(18)]}
            loss = CoSENTLoss(model, gather_across_devices=True, **changes.get("loss", {}))
        args = arguments(Path(folder), optim="sgd", learning_rate=0.1, per_device_train_batch_size=6 // world,
                         per_device_eval_batch_size=6 // world, max_steps=5, dataloader_drop_last=True,
                         fsdp=is_sharded or None, **changes.get("arguments", {}))  # fmt: skip
        keywords = {name: value for name, value in changes.items() if name not in ("loss", "arguments")}
        rows = Dataset.from_dict(data)
        trainer = rt.Trainer(model, args, rows, rows, loss=loss, **keywords)
        start = [each.detach().clone() for each in model.parameters()]
        trainer.train()
        after[form] = {name: each.detach() for name, each in trainer.model.named_parameters()}
        assert is_sharded == (trainer.model is not model)
        assert any(not torch.equal(a, b) for a, b in zip(start, after[form].values(), strict=True))
        after[form]["eval_loss"] = torch.tensor(trainer.evaluate()["eval_loss"], dtype=torch.float64)
        if form == "packed":
            trainer.save_model(f"{folder}/saved{world}")
    torch.save(after, f"{folder}/{world}-{rank}.pt")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sharded_trainer_equals_one_process(tmp_path):
    for world in (1, 2, 3):
        together(steps_of_trainer, world, str(tmp_path), port())
    one = torch.load(tmp_path / "1-0.pt")
    for name in ("2-0", "2-1", "3-0", "3-2"):
        for form, weights in torch.load(tmp_path / f"{name}.pt").items():
            # Llama's norm computes in float32; the regularizer is a mean over the texts of each process
            limit = {"bidirectional": 1e-8, "keep": 1e-3}.get(form, 1e-10)
            torch.testing.assert_close(
                weights, one[form], atol=limit, rtol=0, msg=lambda text, at=form: f"{at}: {text}"
            )
    saved = [SentenceTransformer(str(tmp_path / f"saved{world}")).encode(SENTENCES) for world in (1, 2, 3)]
    assert abs(saved[1] - saved[0]).max() < 1e-6 and abs(saved[2] - saved[0]).max() < 1e-6


def sharded_job(rank: int, world: int, at: str, options: dict[str, Any], last: int) -> None:
    """Run the job train, and end all processes after the step `last`."""
    options["training"] |= {"per_device_train_batch_size": 12 // world, "dataloader_drop_last": True}
    in_group(rank, world, at)
    if world > 1:
        shard_on_cpu()
        options["training"]["fsdp"] = True
    if last:
        LogFile.on_step_end = lambda self, args, state, *_, **__: os._exit(9) if state.global_step == last else None
    rt.train("cosent", **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["full", "sharded", "lora", "certificate"])
def test_a_sharded_job_resumes_and_equals_one_process(tmp_path, form):
    results = []
    for world, last in ((1, 0), (2, 3), (2, 0)):
        out = tmp_path / str(world)
        options = settings(tmp_path, **{"model.name": saved_encoder(tmp_path / "encoder")}, output=str(out))
        del options["model.scratch"]
        options["training"] |= {"max_steps": 6, "eval_steps": 2}
        options["loss.gather_across_devices"] = True
        if form == "lora":
            options["model.lora"] = {"r": 2}
            options["training"] |= {"learning_rate": 0.05}  # no two equal dev scores
        if form == "certificate":
            options["evaluation"] = {"certificate": True, "guard_budget": 200.0}
        if form == "sharded" and world > 1:
            options["training"]["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
        if last:
            with pytest.raises(ProcessExitedException):
                together(sharded_job, world, port(), options, last)
            assert (out / "checkpoints" / "checkpoint-2").is_dir() and not (out / "metrics.json").exists()
        else:
            together(sharded_job, world, port(), options, last)
            weights = {str(f.relative_to(out)): load_file(f) for f in sorted(out.rglob("*.safetensors"))}
            results.append((weights, json.loads((out / "metrics.json").read_text())))
    (one, metrics), (two, sharded) = results
    torch.testing.assert_close(two, one, atol=1e-6, rtol=0)
    assert one and sharded["after"]["pearson"] == pytest.approx(metrics["after"]["pearson"], abs=1e-3)
    if form == "certificate":
        assert sharded["certificate"]["saved"] == metrics["certificate"]["saved"]


def refused(rank: int, world: int, folder: str, at: str) -> None:
    """A loss with weights of its own, and a device on which accelerate does not shard."""
    model = tiny_encoder(double=False)
    in_group(rank, world, at)
    data = Dataset.from_dict(PAIRS | {"label": [row % 3 for row in range(18)]})
    for prepare, message in ((int, "accelerate ignores it"), (shard_on_cpu, "trainable parameters")):
        prepare()
        with pytest.raises(ValueError, match=message):
            rt.Trainer(model, arguments(Path(folder), fsdp=True), data, loss=SoftmaxLoss(model))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_cannot_be_sharded_is_an_error(tmp_path):
    together(refused, 2, str(tmp_path), port())
    base = {"model.name": "encoder", "data.train": ["train.tsv"], "data.dev": "dev.tsv", "training.fsdp": True}
    sharded = {"training.fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "evaluation.certificate": True}
    for more, message in ((sharded, "needs full checkpoints"), ({"model.load_in_4bit": True}, "4-bit")):
        with pytest.raises(ValueError, match=message):
            check_config(load("train", "cosent", base | more))
