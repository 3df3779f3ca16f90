"""Encoders: loaded, made, adapted, given a prompt; asked for embeddings."""
