"""Evaluate encoders on tasks: similarity, transfer, captions, polarity and retrieval."""
