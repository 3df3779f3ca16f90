"""Decoders with bidirectional layers on a CUDA device; `make gpu PARTS=train` runs this."""

import json

import pytest
import torch

from raoe_train import run
from raoe_train.encoders.bidirectional.modeling import BidirectionalModel
from tests.decoders import padded, saved_decoder, sequences, tiny_decoder
from tests.encoders.test_bidirectional_saving import recipe_settings, trained, write_triplets

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_agrees_with_the_cpu_for_any_padding(name, attention, dtype, tolerance):
    wide = {"hidden_size": 64, "head_dim": 16}  # on a GPU flex_attention takes no narrower heads
    truth = BidirectionalModel.around(tiny_decoder(name, "eager", **wide), 1).eval()
    model = BidirectionalModel.around(tiny_decoder(name, attention, **wide), 1).to("cuda", dtype).eval()
    for side in ("left", "right"):
        ids, mask = padded(side, 9)
        with torch.no_grad():
            result = model(input_ids=ids.cuda(), attention_mask=mask.cuda()).last_hidden_state.float().cpu()
            for number, row in enumerate(sequences()):
                expected = truth(input_ids=row[None]).last_hidden_state[0]
                torch.testing.assert_close(result[number][mask[number].bool()], expected, atol=tolerance, rtol=0)


def test_gradients_with_checkpointing():
    gradients = []
    for checkpointing in (False, True):
        model = BidirectionalModel.around(tiny_decoder("llama", "sdpa"), 1).cuda().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids, mask = (x.cuda() for x in padded("left", 5))
        model(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()].square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("four_bit", [False, True])
def test_the_bellm_recipe(tmp_path, four_bit):
    pytest.importorskip("datasets")
    if four_bit:
        pytest.importorskip("bitsandbytes")
    base = saved_decoder(tmp_path)
    options = recipe_settings(tmp_path, base, **{"data.train": write_triplets(tmp_path / "nli.tsv")})
    options |= {"model.device": "cuda", "model.load_in_4bit": four_bit}
    assert run("train", "bellm", **options)["steps"] == 6
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["base_quantization"] is not None) == four_bit
    assert trained(tmp_path, base) > 1e-3
