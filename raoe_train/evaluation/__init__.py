"""Evaluate encoders on tasks: similarity, transfer, captions, polarity, retrieval and MTEB."""
