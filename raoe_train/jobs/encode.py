"""The job `encode`: embeddings of the sentences of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.artifacts.provenance import digest, earlier_result, identity, versions
from raoe_train.artifacts.writing import replacing, write_json
from raoe_train.data.sentences import read_sentences
from raoe_train.encoders.embed import encode_sentences

if TYPE_CHECKING:
    from raoe_train.config import EncodeConfig


def encode(config: EncodeConfig) -> dict[str, Any]:
    """The job `encode`: embeddings of a file's sentences as .npy, float32 [sentences, d], row i for sentence
    i.

    The input is a .txt file (also .gz) with one sentence a line, or a column of a data file: `sentence` or
    `text`, or the one that data.columns maps `sentence` to.

    Returns:
        {"output", "sentences", "dimension", "model", "versions", "settings"}, also written to OUTPUT.json.

    Raises:
        ValueError: no input or output, a sentence that is no text, or the output of other settings is there
            and overwrite is not set.
    """
    if not config.data.input:
        raise ValueError("data.input is missing: the file to encode")
    if not config.output or not str(config.output).endswith(".npy"):
        raise ValueError(f"output must name a .npy file, got {config.output!r}")
    output = Path(config.output).expanduser()
    summary = output.with_name(output.name + ".json")
    sentences = read_sentences(config.data.input, config.data.columns)
    settings = {
        "model": identity(config.model),
        "input": digest(sentences),
    }
    if done := earlier_result(summary, output, settings, config.overwrite):
        print(f"{output} is there already, from the same model and sentences")
        return done

    from raoe_train.encoders.load import load_encoder

    embeddings = encode_sentences(load_encoder(config.model), sentences, config.batch_size)
    with replacing(output) as temporary:
        np.save(temporary, embeddings)
    result = {
        "output": str(output),
        "sentences": len(embeddings),
        "dimension": int(embeddings.shape[1]),
        "model": config.model.name,
        "versions": versions(),
        "settings": settings,
    }
    write_json(summary, result)
    print(f"{len(embeddings)} sentences x {embeddings.shape[1]} dimensions -> {output}")
    return result
