"""Write a file of pairs byte for byte."""

import gzip

HEADER = "sentence1\tsentence2\tscore\tlabel\tsplit\n"


def write(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)
