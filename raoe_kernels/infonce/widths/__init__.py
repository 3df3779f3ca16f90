"""Backends of info_nce_loss of several prefix widths."""
