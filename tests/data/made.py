"""Write a file of pairs byte for byte; read a file."""

import gzip

from raoe_train.data.sources import Source

HEADER = "sentence1\tsentence2\tscore\tlabel\tsplit\n"


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


def rows_in(path):
    """The rows of a file."""
    return [row for _, row in Source(path).rows]
