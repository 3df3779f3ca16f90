"""What a call would do on a GPU that is not here: the op's own code on meta tensors, its kernels compiled, not run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import assembly


class Operation(NamedTuple):
    """One operation on the device's stream: its name, bytes that it reads and writes at least, FLOPs of matrix products
    and the dtype of what is multiplied, and of a kernel of ours the programs it is launched with, their warps, its
    constants (Triton's) and its code."""

    name: str
    bytes: int
    flops: float = 0
    dtype: torch.dtype = torch.float32
    programs: int = 0
    warps: int = 0
    constants: Mapping[str, Any] = {}
    code: Sequence[assembly.Instruction] = ()


def operations(call: Callable[[], object], arch: int) -> list[Operation]:
    """All that `call`, on meta tensors, puts on the stream of a GPU of this compute capability."""
    found: list[Operation] = []
    with _no_gpu(arch, found), _Torch(found):
        call()
    return found


def size_of(*tensors: object) -> int:
    """Bytes of what the tensors among these cover in memory."""
    unique = {id(x): x for x in tensors if isinstance(x, torch.Tensor)}
    return sum(x.itemsize * math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step or not n)
               for x in unique.values())  # fmt: skip


@cache
def _code(cubin: bytes) -> list[assembly.Instruction]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        (code,) = assembly.sass(Path(file.name)).values()
    return code


class _Torch(TorchDispatchMode):
    """Notes torch's own operations that move something. A product of what was only just widened takes it as it was, as
    it does on a GPU, where torch adds products of half precision in float32."""

    def __init__(self, found: list[Operation]) -> None:
        super().__init__()
        self.found = found
        self.widened: dict[int, tuple[torch.Tensor, torch.Tensor, Operation]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not view and "empty" not in func.__name__:
            given, made = tree_leaves((args, kwargs)), tree_leaves(result)
            packet, flops = func.overloadpacket, 0
            if packet in flop_registry:
                flops = flop_registry[packet](*args, **kwargs, out_val=result)
                given = [self._as_it_was(x) for x in given]
            dtypes = [x.dtype for x in given if isinstance(x, torch.Tensor)] or [torch.float32]
            kind = min(dtypes, key=lambda dtype: dtype.itemsize)  # products may add to what is wider than their factors
            self.found.append(Operation(str(packet), size_of(*given, *made), flops, kind))
            if packet is torch.ops.aten._to_copy:
                self.widened[id(result)] = (result, args[0], self.found[-1])
        return result

    def _as_it_was(self, x: object) -> object:
        if id(x) not in self.widened:
            return x
        _, source, copy = self.widened.pop(id(x))
        self.found.remove(copy)
        return source


@contextmanager
def _no_gpu(arch: int, found: list[Operation]) -> Iterator[None]:
    """Triton with a driver that launches nothing and notes what it should have."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.name, self.warps = metadata.name, metadata.num_warps
            names = source.fn.arg_names
            self.constants = {names[path[0]]: value for path, value in source.constants.items()}

        def __call__(self, x: int, y: int, z: int, stream: int, cubin: bytes, *rest: Any) -> None:
            first = next(x.dtype for x in rest if isinstance(x, torch.Tensor))
            launch = x * y * z, self.warps, self.constants, _code(cubin)
            found.append(Operation(self.name, size_of(*rest), 0, first, *launch))

    class Utilities:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 1 << 20}

        def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, bytes, int, int, int]:
            return None, cubin, 0, 0, 1024

    class Nothing(DriverBase):
        launcher_cls, utils = Launcher, Utilities()

        def __init__(self) -> None:
            self.get_current_device = lambda: arch
            self.get_current_stream = lambda device: 0

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    before = driver._active
    driver.set_active(Nothing())
    try:
        yield
    finally:
        driver._active = before
