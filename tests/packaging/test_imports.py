"""Allowed imports, and that importing has no side effects."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import raoe_kernels

ROOT = Path(__file__).resolve().parent.parent.parent


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it; `from a import b` counts as a.b, and in full if relative."""
    folders = path.relative_to(ROOT).parent.parts
    kernels = folders[0] == "raoe_kernels"
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # copied beside saved models, where its neighbour is no part of our package
            if path.parent.name == "bidirectional" and (node.level, node.module) == (1, "configuration"):
                continue
            assert kernels or node.level == 0, f"{path}: imports are absolute"
            parts = [*folders[: len(folders) - node.level + 1], node.module] if node.level else [node.module]
            module = ".".join(filter(None, parts))
            # kernel hubs load a copy under another name
            assert not kernels or node.level or not module.startswith("raoe_kernels"), f"{path}: ours is relative"
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def files(package: str) -> list[Path]:
    result = sorted((ROOT / package).rglob("*.py"))
    assert result
    return result


def test_kernels_import_only_torch_triton_and_the_standard_library():
    for path in files("raoe_kernels"):
        allowed = {"torch", "raoe_kernels", *sys.stdlib_module_names}
        if "triton" in path.name:
            allowed.add("triton")  # imported only if a Triton backend is used
        assert not {name for name in imported(path) if name.partition(".")[0] not in allowed}, path


def test_training_uses_the_public_names_of_the_kernels():
    public = {"raoe_kernels", "raoe_kernels.testing", *(f"raoe_kernels.{name}" for name in raoe_kernels.__all__)}
    public.add("raoe_kernels.__version__")
    for path in files("raoe_train"):
        used = {name for name in imported(path) if name.partition(".")[0] == "raoe_kernels"}
        assert used <= public, path


def test_files_copied_beside_models_import_nothing_of_raoe():
    for name in ("configuration", "modeling"):
        used = imported(ROOT / "raoe_train" / "encoders" / "bidirectional" / f"{name}.py")
        assert not {n for n in used if n.startswith("raoe_")}


def test_importing_the_kernels_has_no_side_effects():
    code = (
        "import sys, torch; before = set(sys.modules); import os; environ = dict(os.environ); "
        "import raoe_kernels; new = set(sys.modules) - before; "
        "assert not [m for m in new if m.partition('.')[0] == 'triton'], 'triton'; "
        "assert not [m for m in new if '_native_c' in m], 'a compiled module'; "
        "assert not torch.cuda.is_initialized(), 'CUDA'; assert environ == dict(os.environ), 'environ'"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
