"""The job `encode`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

from raoe_train.artifacts import once
from raoe_train.artifacts.provenance import digest
from raoe_train.artifacts.writing import replacing
from raoe_train.data.sentences import read_sentences
from raoe_train.data.settings import Data
from raoe_train.encoders.embed import encode_sentences
from raoe_train.encoders.named import Model, identity
from raoe_train.jobs.shared import job
from raoe_train.recipe import Option


@job
def encode(
    data: Annotated[Data, Option(word="input")] = Data(),
    model: Annotated[Model, Option(word="name")] = Model(),
    batch_size: Annotated[int, Option("sentences at a time", least=1)] = 64,
    output: Annotated[str | None, ".npy file to write"] = None,
    overwrite: Annotated[bool, "replace the output of another setting"] = False,
) -> dict[str, Any]:
    """Embeddings of the sentences of a file.

    They are written as .npy, float32 [sentences, d], row i for sentence i. The input is a .txt file (also .gz) with one
    sentence a line, or a column of a data file: `sentence` or `text`, or the one that data.columns maps `sentence` to.

    Returns:
        {"output", "sentences", "dimension", "model", "versions", "settings"}, also written to OUTPUT.json. ValueError
        for no input or output, a sentence that is no text, or the output of other settings in the way.
    """
    if not data.input:
        raise ValueError("data.input is missing: the file to encode")
    if not output or not output.endswith(".npy"):
        raise ValueError(f"output must name a .npy file, got {output!r}")
    path = Path(output).expanduser()
    sentences = read_sentences(data.input, data.columns)
    settings = {"model": identity(model), "input": digest(sentences)}
    if done := once.found(path, settings, overwrite):
        print(f"{path} is there already, from the same model and sentences")
        return done

    from raoe_train.encoders.load import load_encoder

    embeddings = encode_sentences(load_encoder(model), sentences, batch_size)
    once.claim(path, settings)
    with replacing(path) as temporary:
        np.save(temporary, embeddings)
    print(f"{len(embeddings)} sentences x {embeddings.shape[1]} dimensions -> {path}")
    result = {"sentences": len(embeddings), "dimension": int(embeddings.shape[1]), "model": model.name}
    return once.finish(path, settings, result)
