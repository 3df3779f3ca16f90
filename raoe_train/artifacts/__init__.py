"""Outputs of jobs: write files atomically, resume work, record the inputs of a result. Independent of encoders."""
