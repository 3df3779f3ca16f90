"""Degradation: main metrics of an encoder whose last layers are removed, one after the other (the BeLLM paper's Section
3.1, Figure 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raoe_train.evaluation.tasks import Task, evaluate_tasks, main_score

# Where models keep their layers: decoders and ModernBERT, BERT and its like, DistilBERT.
LISTS = ("layers", "encoder.layer", "transformer.layer")


def analyse(model: Any, tasks: Mapping[str, Task], output: Path | None, batch_size: int = 64) -> dict[str, Any]:
    """The analysis `degradation` of the job `evaluate`: main metrics against the number of layers kept, and beside its
    output a plot. Layers go from the last to the first, the final norm stays; afterwards the SentenceTransformer is as
    it was.

    Returns:
        {"layers": [1, …, all], "tasks": {word: [main metric x100]}, "average": [their mean]}; None stands for an
        undefined metric. ValueError for a model whose layers are not known.
    """
    from raoe_train.studies.plots import plot_lines

    owner, name = _layer_list(model[0].model)
    counts = list(range(1, len(getattr(owner, name)) + 1))
    results = []
    for count in counts:
        with first_layers(model, count):
            results.append(evaluate_tasks(model, tasks, batch_size))
    found = {
        "layers": counts,
        "tasks": {word: [main_score(result["tasks"][word]) for result in results] for word in tasks},
        "average": [result["average"] for result in results],
    }
    if output:
        points = list(zip(counts, found["average"], strict=True))
        path = output.with_name(f"{output.stem}-degradation.png")
        plot_lines({"": {output.stem: points}}, "layers kept", "average x 100", path, log=False)
    return found


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Within it, a SentenceTransformer has only its first `count` layers, and behind them its final norm.

    Layers of a BidirectionalModel that look both ways go on doing so. Where it adds both directions, in mode "sum",
    they are added after the last layer kept."""
    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel, add_halves

    inner = model[0].model
    owner, name = _layer_list(inner)
    layers = getattr(owner, name)
    added = None
    try:
        # The list itself is cut, not the configuration's num_hidden_layers: encoders go through the whole list, and
        # a BidirectionalModel finds the windows of its last layers by the configuration's depth.
        setattr(owner, name, layers[:count])
        if isinstance(inner, BidirectionalModel) and inner.config.bidirectional_mode == "sum":
            causal = len(layers) - inner.config.bidirectional_layers
            # the first of these layers doubles the batch, and the last, which is gone, would add the halves
            if causal < count < len(layers):
                added = layers[count - 1].register_forward_hook(add_halves)
        yield
    finally:
        setattr(owner, name, layers)
        if added is not None:
            added.remove()


def _layer_list(inner: Any) -> tuple[Any, str]:
    """The module that has the layers of a transformers model, and the name of their list in it."""
    from torch import nn

    from raoe_train.encoders.bidirectional.modeling import BidirectionalModel

    whole = inner.decoder if isinstance(inner, BidirectionalModel) else inner
    modules = dict(whole.named_modules())  # the whole is called ""
    for place in LISTS:
        owner, _, name = place.rpartition(".")
        layers = modules.get(place)
        # a list of another length is not of the layers, or not of all
        if isinstance(layers, nn.ModuleList) and len(layers) == whole.config.num_hidden_layers:
            return modules[owner], name
    raise ValueError(f"layers cannot be removed from a {whole.config.model_type!r}: it has none of {', '.join(LISTS)}")
