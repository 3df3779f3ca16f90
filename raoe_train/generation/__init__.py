"""Generate ranking sentences with a language model: chains that move step by step away from a source sentence."""

from raoe_train.generation.decoding import Answer, Context, GuidedDecoder, Request, Sampling
from raoe_train.generation.growth import Chain, Generation, grow
from raoe_train.generation.instructions import Instructions

__all__ = ["Answer", "Chain", "Context", "Generation", "GuidedDecoder", "Instructions", "Request", "Sampling", "grow"]
