"""info_nce_loss of several prefix widths from one sweep over the columns."""

from .autograd import WIDTHS, info_nce_widths

__all__ = ["WIDTHS", "info_nce_widths"]
