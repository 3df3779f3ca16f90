"""Training: the trainer, its data, its callbacks and its measures."""
