"""The job `encode`: write embeddings of sentences to a .npy file."""

from functools import partial
from typing import Any

import numpy as np

from raoe_train.data.sources import Texts, read_sentences
from raoe_train.encoders.embed import encode_sentences, print_cut, refuse_conditional
from raoe_train.jobs.settings import EncodeConfig
from raoe_train.jobs.shared import job, require
from raoe_train.outputs import Output, replacing
from raoe_train.parts import write_parts
from raoe_train.processes import print_on_rank_zero, rank_and_world


@job(together=True)
@print_on_rank_zero()
def encode(config: EncodeConfig, output: Output) -> dict[str, Any]:
    """Read sentences from a file, and write their embeddings to a .npy file.

    OUTPUT contains a float32 array [sentences, d], whose row i is the embedding of sentence i. The input is a .txt or
    .txt.gz file with one sentence per line, or a data file with a column `sentence` or `text` (for other column names,
    set data.columns). Finished embeddings are stored in OUTPUT.parts/ until OUTPUT is written, so that an interrupted
    job can resume, even with a different number of processes. Under torchrun, each process encodes its share of the
    sentences, and rank 0 writes OUTPUT.

    Returns:
        {"output", "sentences", "dimension", "model", "versions", "settings"}, also written to OUTPUT.json.
    """
    source = require(config.data.input, "data.input", "the file to encode")
    require(config.model.name, "model.name", "the encoder to use")
    path = require(config.output, "output", "the .npy file to write")
    if not path.endswith(".npy"):
        raise ValueError(f"output must name a .npy file, got {path!r}")
    table = read_sentences(source, config.data.columns)

    from raoe_train.encoders.load import load_encoder

    encoder = load_encoder(config.model)
    refuse_conditional(encoder, config.model.name)
    print_cut(encoder, Texts({"": table}), source)
    embed = partial(encode_sentences, encoder, batch_size=config.batch_size)
    paths = write_parts(output.parts, table["sentence"], embed, "encode")
    if rank_and_world()[0] > 0:
        return {}
    count, dimension = len(table), np.load(paths[0]).shape[1]
    output.begin()
    with replacing(output.path) as temporary, temporary.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, dimension)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in paths:
            file.write(np.load(part).tobytes())
    print(f"wrote {count} embeddings with {dimension} dimensions to {path}")
    return {"sentences": count, "dimension": dimension, "model": config.model.name}
