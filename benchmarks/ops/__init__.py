"""One file per op: its inputs, its contenders and its minimum work."""
