"""Stand-ins for the gigabytes of CUDA libraries that torch's Linux builds on PyPI link. On a CPU none of their
functions is called, so libraries with equal names and symbol versions suffice, whose functions return 0."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

THEIRS = r"(?:cu|nv|nccl)\w*"  # names of NVIDIA's libraries and functions


def stand_in(folder: Path) -> list[str]:
    """Write the missing libraries into torch's `lib` folder and return their names."""
    every = sorted(str(path) for path in folder.glob("*.so*"))
    there = {Path(path).name for path in every}
    versions = dict.fromkeys(
        set(re.findall(rf"NEEDED.*\[(lib{THEIRS}\.so[.\d]*)\]", _said("readelf", "-dW", *every))) - there, ""
    )
    for file, version in re.findall(r"File: (\S+).*\n.*Name: (\S+)", _said("readelf", "-VW", *every)):
        if file in versions:
            versions[file] = version
    undefined = _said("nm", "-D", "--undefined-only", *every)
    wanted = set(re.findall(rf" U (_*{THEIRS})(?:@(\S+))?", undefined))
    for file, version in versions.items():
        names = sorted(name for name, of in wanted if of in ("", version))
        symbols = "".join(f".globl {name}\n.type {name},@function\n{name}:\n" for name in names)
        code = f'.text\n{symbols}xorl %eax,%eax\nret\n.section .note.GNU-stack,"",@progbits\n'
        script = folder / "stand_ins.map"
        script.write_text(f"{version} {{ global: *; }};")
        options = ("-shared", "-nostdlib", f"-Wl,-soname,{file}", f"-Wl,--version-script={script}", "-x", "assembler")
        subprocess.run(["gcc", *options, "-", "-o", str(folder / file)], input=code, text=True, check=True)
        script.unlink()
    return sorted(versions)


def _said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout
