"""Evaluation of encoders on tasks of several kinds."""
