"""Ranking sentences with a language model: chains that move away from a sentence step by step."""
