"""What a loss has of its own beside its model (a temperature that is learned, pairs of earlier steps), in checkpoints.

transformers' Trainer writes the model alone; a loss would begin anew where its run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raoe_train.losses.by_length import MODELS

GUIDE = "guide"  # of sentence-transformers' GIST losses: frozen, and as large as a model


def save_loss_state(folder: Path, loss: Any, model: Any, process: int) -> None:
    """Write all parameters and persistent buffers of a loss, or of losses by name, that are not its model's.

    There is a file for each process: where batches are not gathered, each has another state. Without state, none.
    """
    state: dict[str, Any] = {}
    for prefix, module in _own(loss, model):
        module._save_to_state_dict(state, prefix, keep_vars=False)
    if state:
        folder.mkdir(parents=True, exist_ok=True)  # the first process, which makes it, may be later
        torch.save(state, _file(folder, process))


def load_loss_state(folder: Path, loss: Any, model: Any, process: int) -> None:
    """Read back what save_loss_state wrote; where there were fewer processes, that of the first.

    ValueError where the checkpoint has none for this loss, another loss's, or one of another shape.
    """
    needed: dict[str, Any] = {}
    for prefix, module in _own(loss, model):
        module._save_to_state_dict(needed, prefix, keep_vars=False)
    if not needed:
        return
    file = next((file for file in (_file(folder, process), _file(folder, 0)) if file.is_file()), None)
    state = {} if file is None else torch.load(file, map_location="cpu", weights_only=True)
    if state.keys() != needed.keys():
        raise ValueError(
            f"{folder} has another loss's state: this one has {', '.join(sorted(needed))}, "
            f"the checkpoint {', '.join(sorted(state)) or 'nothing'}; begin anew, or go on with the loss it began with"
        )
    errors: list[str] = []
    for prefix, module in _own(loss, model):
        module._load_from_state_dict(state, prefix, {}, True, [], [], errors)
    if errors:
        raise ValueError(f"{folder} has another loss's state: {'; '.join(errors)}")


def _file(folder: Path, process: int) -> Path:
    return folder / f"loss_state_{process}.pt"


def _own(loss: Any, model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(prefix of its names, module) of a loss and what is inside it, down to models."""
    children: Any = loss.items() if isinstance(loss, Mapping) else loss.named_children()
    if not isinstance(loss, Mapping):
        yield prefix, loss
    for name, child in children:
        if isinstance(child, nn.Module) and child is not model and name not in (*MODELS, GUIDE):
            yield from _own(child, model, f"{prefix}{name}.")
