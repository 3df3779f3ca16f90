"""Backends of info_nce_loss for several prefix widths."""
