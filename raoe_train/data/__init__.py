"""Reading sentence pairs, and the built-in corpus."""

from raoe_train.data.corpus import corpus_sentences, generate_corpus
from raoe_train.data.pairs import read_pairs

__all__ = ["corpus_sentences", "generate_corpus", "read_pairs"]
