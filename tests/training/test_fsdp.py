"""Losses with gathering and cached gradients where accelerate shards the encoder: FSDP 2 in two processes over gloo.

FSDP 1 cannot be tried without a GPU: torch (2.13) says that it "needs a non-CPU accelerator device".
"""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from raoe_train.encoders import lengths
from raoe_train.losses import ByLength, InfoNCELoss, ListMLELoss, RAOELoss
from tests.forked import together
from tests.losses.test_global_batch import RATE, REPLAYS_IN_DOUBLE, TOLERANCE, cases, packed_rows, packing, step
from tests.tiny import tiny_encoder, total


def sharding_accelerator() -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BertLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On a CPU accelerate ignores the plugin, and would wrap in DistributedDataParallel; all that follows is its own.
    PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


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
        for made, settings, whole, parts in cases(model, world):
            if made not in (RAOELoss, InfoNCELoss, ListMLELoss) or made in seen:
                continue
            seen.add(made)
            _, expected = step(made(model, **settings), model, initial, *whole)
            model.load_state_dict(initial)
            # Sharded layers are gathered in every forward, so processes need as many mini-batches: 7 and 12 sentences
            # make two each of 6.
            pieces = 6 if made is ListMLELoss else 2
            for mini_batch_size, around in itertools.product((None, pieces), (None, ByLength, packing)):
                sharded = copy.deepcopy(model)
                sharded, optimiser = accelerator.prepare(sharded, torch.optim.SGD(sharded.parameters(), lr=RATE))
                assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
                loss = made(sharded, **settings, mini_batch_size=mini_batch_size, gather_across_devices=True)
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
