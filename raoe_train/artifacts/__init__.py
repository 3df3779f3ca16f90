"""Outputs of jobs: write files atomically, resume work, record the inputs of results. Imports no encoder code."""
