"""Outputs of jobs: writing files in one step, resuming work, and recording what a result was made from.
Nothing here depends on encoders."""
