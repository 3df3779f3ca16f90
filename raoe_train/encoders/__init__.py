"""Encoders: loading, creating and adapting them, their prompts and their embeddings."""
