"""What a loss has of its own beside its model (a temperature that is learned, pairs of earlier steps), in checkpoints.

transformers' Trainer writes the model alone; a loss would begin anew where its run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from raoe_train.losses.base import losses_in


def save_loss_state(folder: Path, loss: Any, process: int) -> None:
    """Write all parameters and persistent buffers of a loss, or of losses by name, that are not its encoders'.

    There is a file for each process: where batches are not gathered, each has another state. Without state, none.
    """
    if state := _state(loss):
        folder.mkdir(parents=True, exist_ok=True)  # the first process, which makes it, may be later
        torch.save(state, _file(folder, process))


def load_loss_state(folder: Path, loss: Any, process: int) -> None:
    """Read back what save_loss_state wrote; where there were fewer processes, that of the first.

    ValueError where the checkpoint has none for this loss, another loss's, or one of another shape.
    """
    needed = _state(loss)
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
    for prefix, module in _own(loss):
        module._load_from_state_dict(state, prefix, {}, True, [], [], errors)
    if errors:
        raise ValueError(f"{folder} has another loss's state: {'; '.join(errors)}")


def _state(loss: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for prefix, module in _own(loss):
        module._save_to_state_dict(state, prefix, keep_vars=False)
    return state


def _file(folder: Path, process: int) -> Path:
    return folder / f"loss_state_{process}.pt"


def _own(loss: Any) -> Iterator[tuple[str, Any]]:
    """(prefix of its names, module) of a loss and what is inside it, down to encoders. Not state_dict, which would ask
    those, too: where they are sharded, for all of their weights."""
    for name, each in loss.items() if isinstance(loss, Mapping) else [("", loss)]:
        yield from losses_in(each, f"{name}." if name else "")
