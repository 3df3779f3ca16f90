"""info_nce_loss of several widths, each computed by the Triton kernels."""

from .. import triton_kernels
from .weights import each_width, with_weights

forward, backward = with_weights(each_width(triton_kernels))
