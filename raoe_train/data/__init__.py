"""Read sentence pairs, triplets, lists and labelled texts from files, hubs and folders of public data sets."""

from raoe_train.data.pairs import read_pairs

__all__ = ["read_pairs"]
