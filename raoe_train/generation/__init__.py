"""Generate ranking sentences with a language model: chains that move step by step away from a source sentence."""

from raoe_train.generation.chains import Chain, grow
from raoe_train.generation.guided import Answer, GuidedDecoder, Request
from raoe_train.generation.instructions import Instructions
from raoe_train.settings import Generation, Sampling

__all__ = ["Answer", "Chain", "Generation", "GuidedDecoder", "Instructions", "Request", "Sampling", "grow"]
