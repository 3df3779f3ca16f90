"""Reading data: sentence pairs, triplets, lists and labelled texts, from files, hubs and public benchmarks' folders."""

from raoe_train.data.pairs import read_pairs

__all__ = ["read_pairs"]
