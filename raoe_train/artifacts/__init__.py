"""Outputs of jobs: write files atomically, resume work, and record the inputs of a result. No module here depends on
encoders."""
