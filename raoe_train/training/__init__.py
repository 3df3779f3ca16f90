"""Training: the trainer, what it reads, and what it measures."""
