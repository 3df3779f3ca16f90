"""info_nce_loss for several widths, with one call of the Triton backend per width."""

from .. import triton_kernels
from .weights import each_width, with_weights

forward, backward = with_weights(each_width(triton_kernels))
