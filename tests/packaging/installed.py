"""Check an installed raoe with the Python it is installed for, in a temporary folder outside the checkout:

    python -I installed.py cpu+cuda|cpu|none

The named compiled modules exist and run; with torch, a loss is computed; with the extra `train`, an encoder is trained.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import json
import os
import runpy
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path


def compiled(package: Path, kinds: list[str]) -> None:
    """Load the compiled modules alone, without torch and the rest of raoe."""
    modules = {kind: package / f"_native_{kind}{EXTENSION_SUFFIXES[0]}" for kind in kinds}
    assert sorted(package.glob("_native_*")) == sorted(modules.values()), list(package.glob("_native_*"))
    built = json.loads((package / "_build_info.json").read_text(encoding="utf-8"))["modules"]
    assert [kind for kind in built if built[kind]["built"]] == kinds, built
    for kind, path in modules.items():
        spec = importlib.util.spec_from_file_location(f"_native_{kind}", path)
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        assert "torch" not in sys.modules
        assert hasattr(module, "pairwise")
        if kind == "cpu":
            called(module)


def called(module) -> None:
    """Two pairs in the wrong order, cosine 0 of both: the loss is log(1 + e^0), its gradient -+1/2."""
    scores, similarity, grads = (ctypes.c_float * 2)(1, 0), (ctypes.c_float * 2)(), (ctypes.c_float * 2)()
    loss, labels = ctypes.c_float(), (ctypes.c_int64 * 2)(0, 0)
    at = ctypes.addressof
    pairs, options, results = (
        (at(similarity), at(scores), at(labels), 2, 2, 0),
        (0, True, False, False),
        (at(loss), at(grads)),
    )
    fields = (*pairs, *options, 1.0, 1, 1.0, 1.0, *results)
    module.pairwise(*fields, 1, 1)
    assert abs(loss.value - 0.6931472) < 1e-6 and [round(x, 6) for x in grads] == [-0.5, 0.5], (loss.value, list(grads))
    for wrong in (fields, (*fields, "1", 1)):  # one argument missing; a string in place of a number
        with contextlib.suppress(TypeError):
            module.pairwise(*wrong)
            raise AssertionError("no TypeError")


def computes(kinds: list[str]) -> None:
    """Compare a loss and its gradient by the default backend and by scan."""
    import torch

    import raoe_kernels

    assert (raoe_kernels.backends("cpu")["raoe_loss"]["native"] is True) == ("cpu" in kinds)
    similarity, scores = torch.rand(2, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for backend in ("auto", "scan"):
        leaf = similarity.clone().requires_grad_()
        loss = raoe_kernels.raoe_loss(leaf, scores, torch.arange(512) % 3, margin=2, scale=20.0, backend=backend)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("raoe_kernels", run_name="__main__", alter_sys=True)
    assert "Backends on cpu" in printed.getvalue()


def trains() -> None:
    import raoe_train as rt

    training = {"max_steps": 8, "per_device_train_batch_size": 16}
    rt.run("train", "demo", output="encoder", training=training, data={"max_rows": 128})
    encoder = rt.load_encoder("encoder")
    assert encoder.encode(["A dog barks.", "A cat sleeps."]).shape == (2, 128)


def main() -> None:
    expected = sys.argv[1]
    kinds = [] if expected == "none" else expected.split("+")
    os.chdir(tempfile.mkdtemp())
    package = Path(importlib.util.find_spec("raoe_kernels").submodule_search_locations[0])
    assert package.is_relative_to(sys.prefix), f"not the installed one: {package}"
    process = ["modules called"]
    compiled(package, kinds)
    if importlib.util.find_spec("torch"):
        computes(kinds)
        process.append("loss and gradient as scan's")
        if importlib.util.find_spec("sentence_transformers"):
            trains()
            process.append("trained an encoder")
    print(f"Python {sys.version.split()[0]}, compiled {expected}: {', '.join(process)}")


if __name__ == "__main__":
    main()
