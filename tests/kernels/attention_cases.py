"""Batches of sentences for the attention ops, the same ones in every form of padding."""

from __future__ import annotations

import torch
from torch import Tensor

from raoe_kernels import bidirectional_attention, dual_attention

FORMS = ["full", "lengths", "left", "holes", "packed"]


def real_tokens(form: str, lengths: list[int], longest: int) -> Tensor:
    """[b, longest] bool: where the tokens of the sentences stand."""
    place = torch.arange(longest)
    count = torch.tensor(lengths)[:, None]
    if form == "left":
        return place >= longest - count
    if form == "holes":
        seeded = torch.Generator().manual_seed(5)
        order = torch.rand(len(lengths), longest, generator=seeded).argsort(1)
        return order < count
    return place < count


class Batch:
    """Random sentences in one form; padding holds `rubbish`. All tensors that an op takes, and their results."""

    def __init__(
        self, form: str, lengths: list[int], longest: int, heads=(2, 2), d=8, dtype=torch.float64, device="cpu",
        rubbish=float("nan"), seed=0,
    ):  # fmt: skip
        self.form, self.device = form, device
        if form == "full":
            lengths = [longest] * len(lengths)
        self.lengths = lengths
        self.real = real_tokens(form, lengths, longest)
        seeded = torch.Generator().manual_seed(seed)

        def sentences(n: int) -> Tensor:
            # A sentence's numbers depend on the seed and on the order of the sentences alone, not on the form.
            rows = torch.full((len(lengths), longest, n, d), rubbish, dtype=torch.float64)
            for row, real, count in zip(rows, self.real, lengths, strict=True):
                row[real] = torch.randn(count, n, d, generator=seeded, dtype=torch.float64)
            return self._shaped(rows).to(dtype)

        self.q, self.k, self.v = (sentences(n) for n in (heads[0], heads[1], heads[1]))
        self.upstream = [sentences(heads[0]) for _ in range(2)]
        self.where: dict = {}
        if form == "lengths":
            self.where = {"lengths": torch.tensor(lengths)}
        elif form in ("left", "holes"):
            self.where = {"padding_mask": self.real.clone()}
        elif form == "packed":
            ends = torch.tensor([0, *lengths]).cumsum(0)
            self.where = {"cu_seqlens": ends.int(), "max_seqlen": longest}

    def _shaped(self, rows: Tensor) -> Tensor:
        return rows[self.real] if self.form == "packed" else rows.transpose(1, 2).contiguous()

    def tokens(self, x: Tensor) -> Tensor:
        """[all real tokens, heads, …] of a result, the same order in every form."""
        return x.cpu() if self.form == "packed" else x.cpu().transpose(1, 2)[self.real]

    def padding(self, x: Tensor) -> Tensor:
        return x.cpu()[:0] if self.form == "packed" else x.cpu().transpose(1, 2)[~self.real]

    def run(self, dual: bool, backend: str, **options) -> list[Tensor]:
        """Outputs and the gradients of q, k, v, these only where gradients are enabled; dropout's seed is fixed."""
        torch.manual_seed(11)
        inputs = [x.to(self.device).clone().requires_grad_() for x in (self.q, self.k, self.v)]
        where = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in self.where.items()}
        if dual:
            results = list(dual_attention(*inputs, **where, backend=backend, **options))
        else:
            results = [bidirectional_attention(*inputs, **where, backend=backend, **options)]
        if not torch.is_grad_enabled():
            return results
        upstream = [x.to(self.device) for x in self.upstream[: len(results)]]
        return [*(x.detach() for x in results), *torch.autograd.grad(results, inputs, upstream)]
