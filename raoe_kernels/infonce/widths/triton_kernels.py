"""info_nce_loss for several embedding widths, with one call to the Triton backend per width."""

from .. import triton_kernels
from .weights import each_width, with_weights

forward, backward = with_weights(each_width(triton_kernels))
