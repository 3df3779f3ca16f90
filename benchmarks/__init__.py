"""Speed and memory of the ops against named peers, side by side in one run: `python -m benchmarks OP`."""
