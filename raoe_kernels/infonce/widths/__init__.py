"""info_nce_loss of several prefix widths in a single pass over the columns."""

from .autograd import WIDTHS, info_nce_widths

__all__ = ["WIDTHS", "info_nce_widths"]
