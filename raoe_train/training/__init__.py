"""Training: the trainer, its data, its callbacks, and evaluation before and after training."""
