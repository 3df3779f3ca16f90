"""One file an op: its inputs, its contenders, the least work that it could do."""
