"""The losses of all pairs of anchors and columns, InfoNCE and the sigmoid loss, as tests of both call them: rows,
options by name, and who watches what is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import raoe_kernels
from raoe_kernels.testing import assert_loss_accurate
from tests.kernels.conftest import PLACES

DTYPES = F16, BF16, F32, F64 = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
HERE = [place for place in PLACES if place[1] != "native"]  # neither has a native backend
IDS = ["-".join(here) for here in HERE]
# What is not the specification itself.
JUDGED = pytest.mark.parametrize(
    "place", [here for here in HERE if here != ("cpu", "reference")], indirect=True, ids="-".join
)


def by_shape(shapes):
    """Of (sizes, columns, options, dtypes): an argument each of `sizes, width, which, dtype`. Dtypes meet every way to
    leave columns out, rows of one tile and of several, aligned and odd: a pair of them each, not all of all."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
    return [
        pytest.param(
            sizes, width, which, dtype, id=f"{sizes}-{width}-{which}-{names[dtype]}".replace(" ", ""), marks=marks
        )
        for sizes, width, which, *marks, dtypes in shapes
        for dtype in dtypes
    ]


def rows(sizes, columns, dtype, device="cpu", seed=0):
    """Matrices of some numbers of rows, of norms from a tenth to ten; None for a size of None."""
    seeded = torch.Generator().manual_seed(seed)

    def one(size):
        x = torch.randn(size, columns, generator=seeded, dtype=torch.float64)
        return x * 10 ** (torch.rand(size, 1, generator=seeded, dtype=torch.float64) * 2 - 1) / columns**0.5

    return [None if size is None else one(size).to(dtype).to(device) for size in sizes]


def mapped(value, change):
    """A value with its tensors changed, in tuples, lists and dicts too."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(each, change) for name, each in value.items()}
    return type(value)(mapped(each, change) for each in value) if isinstance(value, (tuple, list)) else value


def numbers(values, like):
    """() tensors in the dtype of the arithmetic."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return [torch.tensor(x, dtype=dtype, device=like.device) for x in values]


@dataclass(frozen=True)
class Contrast:
    """key: the op's; loss: the public function; learned: numbers that are differentiated beside the rows; lowest: the
    smallest target; single, mixed: names of options, the fullest last; also: an option more, for tests of few."""

    key: str
    loss: Callable
    lowest: int
    single: tuple[str, str]
    mixed: tuple[str, str]
    learned: dict[str, float] = field(default_factory=dict)
    also: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.key

    def __call__(self, leaves, **options):
        """The loss of rows, and of numbers behind them."""
        rows = leaves[: len(leaves) - len(self.learned)] if self.learned else leaves
        return self.loss(*rows, **dict(zip(self.learned, leaves[len(rows) :], strict=True)), **options)

    def shapes(self, *chosen):
        """by_shape of all, or of the chosen: one row, no negatives, ragged tiles and chunks, aligned and odd widths."""
        slow = pytest.mark.slow
        table = [
            ((1, 1, None), 3, "plain", DTYPES),
            ((5, 5, None), 7, "plain", DTYPES),
            ((3, 4, 130), 48, self.single[0], [BF16, F32]),
            ((2, 3, None), 384, "plain", [F16, F64]),
            ((34, 34, 7), 17, "plain", [F32]),
            ((35, 38, None), 16, self.single[1], [F16, F64]),
            ((5, 5, 3), 129, "mask", DTYPES),
            ((36, 3, 60), 16, "targets", [BF16]),
            ((36, 40, 3), 20, self.mixed[0], [F32]),
            ((17, 17, 70), 80, "ids", [F16, F64]),
            ((20, 2, 30), 48, self.mixed[1], [BF16, F32]),
            ((9, 9, 5), 385, "mask", slow, DTYPES),
            ((66, 70, 80), 160, self.mixed[1], slow, [BF16, F32]),
            ((66, 70, 80), 160, self.mixed[1], slow, pytest.mark.exhaustive, [F16, F64]),
        ]
        return by_shape([table[k] for k in chosen] or table)

    def leaves(self, inputs, **given):
        """The rows and the learned numbers, those `given` in place of the default ones."""
        return [*inputs, *numbers((self.learned | given).values(), inputs[0])]

    def run(self, inputs, backend, upstream=-1.5, **options):
        """The loss or losses, and the gradients of all there is, under upstream gradients that are not 1."""
        given = {name: options.pop(name) for name in self.learned if name in options}
        leaves = [None if x is None else x.detach().clone().requires_grad_() for x in self.leaves(inputs, **given)]
        loss = self(leaves, backend=backend, **options)
        total = (loss * loss.new_tensor(upstream)).sum()
        return loss.detach(), *torch.autograd.grad(total, [x for x in leaves if x is not None])

    def three(self, sizes, width, which, dtype, device, backend, **more):
        """What `run` gives by a backend, by the reference, and by the reference in float64; and how far logits spread.
        The loss is by the rule."""
        inputs, n, columns = rows(sizes, width, dtype), sizes[0], sizes[1] + (sizes[2] or 0)
        given = self.options(which, n, columns) | more
        ours = self.run(rows(sizes, width, dtype, device), backend, **self.options(which, n, columns, device), **more)
        plain = self.run(inputs, "reference", **given)
        truth = self.run([None if x is None else x.double() for x in inputs], "reference", **given)
        spread = 2 * given.get("scale", 20.0 if self.key == "infonce" else 10.0)
        assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_loss_accurate(ours[0], plain[0], truth[0], spread)
        return ours, plain, truth, spread

    def options(self, which, n, columns, device="cpu"):
        """Optional arguments by name; some anchors share a positive (some have none, where that may be), and ids and
        mask hit positives too."""
        seeded = torch.Generator().manual_seed(1)
        targets = torch.randint(self.lowest, columns, (n,), generator=seeded)
        targets[: n // 2] = targets[0]
        if self.lowest < 0:
            targets[-1] = -1
        mask = torch.rand(n, columns, generator=seeded) < 0.3
        mask[torch.arange(n), targets.clamp(min=0)] = True
        ids, more = ([torch.randint(4, (size,), generator=seeded) for size in (n, columns)] for _ in "ab")
        ids[1][targets[0]] = ids[0][-1] = -(2**31)
        absent = ids[1].clone()
        absent[n::3] = -(2**31)  # no candidates
        both = {"targets": targets, "symmetric": True}
        table = {
            "infonce": {
                "symmetric": {"symmetric": True},
                "targets": {"targets": targets, "scale": 5.0},
                "mask-targets-symmetric": {"ignore": mask, **both},
                "ids-targets-symmetric": {"ignore": tuple(ids), **both, "scale": 60.0},
            },
            "sigmoid": {
                "soft": {"scale": 2.0, "bias": 0.5},
                "targets": {"targets": targets, "scale": 5.0, "bias": -1.0},
                "groups": {"positive_ids": tuple(ids), "bias": -3.0},
                "mask-targets-groups": {"ignore": mask, "targets": targets, "positive_ids": tuple(ids), "bias": 1.0},
                "ids-targets-groups": {"ignore": tuple(ids), "targets": targets, "positive_ids": tuple(more),
                                       "scale": 60},
            },
        }[self.key] | {"plain": {}, "mask": {"ignore": mask}, "ids": {"ignore": (ids[0], absent)}}  # fmt: skip
        return mapped(table[which], lambda x: x.to(device))


INFONCE = Contrast("infonce", raoe_kernels.info_nce_loss, 0, ("symmetric", "symmetric"),
                   ("mask-targets-symmetric", "ids-targets-symmetric"), also={"symmetric": True})  # fmt: skip
SIGMOID = Contrast("sigmoid", raoe_kernels.sigmoid_loss, -1, ("soft", "groups"),
                   ("mask-targets-groups", "ids-targets-groups"), {"scale": 10.0, "bias": -10.0})  # fmt: skip


class Recorder(TorchDispatchMode):
    """Operators that run, and the largest result of any of them that is not a view."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append(str(function.overloadpacket))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result

    def products(self) -> int:
        return sum(call in ("aten.mm", "aten.addmm", "aten.addmm_") for call in self.calls)
