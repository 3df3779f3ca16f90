"""Reading sentence pairs."""

from raoe_train.data.pairs import read_pairs

__all__ = ["read_pairs"]
