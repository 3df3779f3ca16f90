"""A model over several devices: what transformers' and accelerate's device_map goes together with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from raoe_train.artifacts.processes import rank_and_world

DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, Any] | None
OFFLOADED = ("cpu", "disk", "meta")


def placement(device_map: DeviceMap, device: str | None) -> dict[str, Any]:
    """Arguments of from_pretrained; {} without a map. ValueError beside a device, or among several processes."""
    if device_map is None:
        return {}
    if device is not None:
        raise ValueError("model.device_map says where a model is: leave model.device out")
    if rank_and_world()[1] > 1:
        raise ValueError("model.device_map is one process's, whose model has several GPUs: start it without torchrun")
    return {"device_map": device_map if isinstance(device_map, str) else dict(_flat(device_map))}


def spread(model: Any, train: bool) -> dict[str, Any]:
    """{part of a model that from_pretrained loaded with a device_map: its device}; {} where it is on one. ValueError
    where it is to be trained and does not fit: no gradient comes to weights that are kept elsewhere."""
    maps = (getattr(part, "hf_device_map", None) for part in model.modules())
    found: dict[str, Any] = next(filter(None, maps), {})
    there = {str(device) for device in found.values()}
    if train and there.intersection(OFFLOADED) and there != {"cpu"}:
        away = [name for name, device in found.items() if str(device) in OFFLOADED]
        raise ValueError(
            f"model.device_map leaves {len(away)} parts without room on a GPU ({', '.join(away[:3])}), and with such "
            "nothing is trained: more GPUs, model.load_in_4bit, or a dtype of 16 bits"
        )
    return found


def _flat(parts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """A recipe takes the dots of model.layers.0 for sections."""
    for name, device in parts.items():
        name = f"{before}.{name}" if before else name
        if isinstance(device, Mapping):
            yield from _flat(device, name)
        else:
            yield name, device
