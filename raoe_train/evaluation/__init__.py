"""What an encoder is worth: semantic textual similarity from local files, and embeddings of a file."""

from raoe_train.evaluation.encode import encode, encode_sentences
from raoe_train.evaluation.sts import evaluate, evaluate_encoder

__all__ = ["encode", "encode_sentences", "evaluate", "evaluate_encoder"]
