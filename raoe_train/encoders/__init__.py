"""Encoders: load, create and adapt encoders, set prompts, and compute embeddings."""
