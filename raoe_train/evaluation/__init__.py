"""Evaluate encoders on tasks: similarity, transfer, polarity and retrieval."""
