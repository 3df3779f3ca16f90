"""What an encoder is worth: tasks of several kinds, and embeddings of a file."""

from raoe_train.evaluation.encode import encode, encode_sentences
from raoe_train.evaluation.job import evaluate, evaluate_encoder

__all__ = ["encode", "encode_sentences", "evaluate", "evaluate_encoder"]
