"""info_nce_loss of several widths, each computed by the reference."""

from .. import reference
from .weights import each_width, with_weights

forward, backward = with_weights(each_width(reference))
