"""Speed and memory of the ops and of other libraries, timed in the same run: `python -m benchmarks OP`."""
