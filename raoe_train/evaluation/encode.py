"""Embeddings of sentences, and of the sentences of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raoe_train.data.fields import NAMES, TEXT_COLUMNS
from raoe_train.data.files import existing_file, replacing, text_lines, write_json
from raoe_train.data.sources import is_file, open_source
from raoe_train.provenance import digest, earlier_result, identity, versions

if TYPE_CHECKING:
    from raoe_train.config import EncodeConfig


def encode_sentences(
    model: Any, sentences: Sequence[str], batch_size: int = 64, **options: Any
) -> np.ndarray:
    """Embeddings of sentences, each different one encoded once, in batches of like length.

    Args:
        model: a SentenceTransformer.
        sentences: n texts.
        batch_size: sentences at a time.
        options: further arguments of `SentenceTransformer.encode`, such as prompt or task.

    Returns:
        [n, d] float32, in the order of `sentences`, not normalised unless the model does so.

    Raises:
        ValueError: no sentences, or an embedding that is not finite.
    """
    if not sentences:
        raise ValueError("sentences is empty: there is nothing to encode")
    places = {text: place for place, text in enumerate(dict.fromkeys(sentences))}
    training = model.training
    distinct = np.asarray(
        # sentence-transformers sorts by length itself
        model.encode(list(places), batch_size=batch_size, show_progress_bar=sys.stderr.isatty(), **options),
        dtype=np.float32,
    )
    model.train(training)
    finite = np.isfinite(distinct).all(axis=1)
    if not finite.all():
        text = list(places)[int(np.argmin(finite))]
        raise ValueError(
            f"the encoder gives NaN or infinity for {np.sum(~finite)} sentences, the first {text!r}"
        )
    return distinct[[places[text] for text in sentences]]


def unit_rows(embeddings: np.ndarray) -> np.ndarray:
    """[n, d] embeddings with rows of norm 1, in their own dtype; zero rows stay zero."""
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return np.divide(embeddings, norms, out=np.zeros_like(embeddings), where=norms > 0)


def cosines(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Raw cosine of each pair of rows of two [n, d] arrays, [n] float64 from -1 to 1; 0 where a row is zero."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    made = np.divide((a * b).sum(axis=1), norms, out=np.zeros(len(a)), where=norms > 0)
    # 1.0000000000000002 of a sentence with itself would be a score out of range to what reads it
    return np.clip(made, -1, 1)


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

    from raoe_train.encoder import load_encoder

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


def read_sentences(source: str, columns: Mapping[str, Any] | None = None) -> list[str]:
    """The sentences of a source, in order; every line of a .txt file, blank ones too, so that row i stays
    line i + 1."""
    sentences = []
    for where, sentence, problem in each_sentence(source, columns):
        if problem is not None:
            raise ValueError(f"{where}: {problem}")
        sentences.append(sentence)
    if not sentences:
        raise ValueError(f"{source}: there are no sentences")
    return sentences


def each_sentence(
    source: str, columns: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str, str | None]]:
    """(where, sentence, None) of each row of a source, or (where, "", what is wrong with the row).

    ValueError where no column is one of sentences, as that is the same for all rows.
    """
    columns = dict(columns or {})
    if is_file(source) and source.lower().removesuffix(".gz").endswith(".txt") and not columns:
        for number, line in text_lines(existing_file(source)):
            yield f"{source}, line {number}", line or "", "not UTF-8" if line is None else None
        return
    column = columns.pop("sentence", None)
    rows = open_source(source, {name: columns[name] for name in columns if name in NAMES})
    for number, fields in rows.rows:
        where = f"{rows.name}, {rows.unit} {number}"
        if isinstance(fields, str):
            yield where, "", fields
            continue
        column = column or next((name for name in TEXT_COLUMNS if name in fields), None)
        if column not in fields:
            raise ValueError(
                f"{where}: no column {column or ' or '.join(TEXT_COLUMNS)!r}; "
                f"there are: {', '.join(fields)}; say which: columns sentence=..."
            )
        text = fields[column]
        good = isinstance(text, str)
        yield where, text if good else "", None if good else f"{column} is {text!r}, not a text"
