"""`python -m raoe_kernels`: print versions, build details, and which backends can run each function on this machine."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from . import __version__, backends
from ._build import info
from ._dispatch import NAMES


def versions() -> list[tuple[str, str]]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    cuda = torch.version.cuda or ("ROCm " + torch.version.hip if torch.version.hip else "none (a CPU build)")
    return [
        ("raoe", __version__),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("torch", torch.__version__),
        ("torch's CUDA", cuda),
        ("triton", triton),
        ("threads", str(torch.get_num_threads())),
    ]


def build() -> list[tuple[str, str]]:
    record = info()
    if record is None:
        return [("build", "no build info: the compiled modules were never built (plain checkout)")]
    rows = [("build", f"RAOE_KERNELS_BUILD={record['requested']}, commit {record['commit'] or 'unknown'}, "
                      f"Python {record['python']}, {record['platform']}")]  # fmt: skip
    for kind, module in record["modules"].items():
        if not module["built"]:
            rows.append((f"{kind} module", f"not built: {module['reason']}"))
            continue
        text = module["compiler"]
        if "nvcc" in module:
            archs = ", ".join(f"sm_{arch}" for arch in module["archs"])
            text = f"nvcc {module['nvcc']} for {archs} and PTX {module['ptx']}, {text}"
        rows.append((f"{kind} module", text))
        rows.append(("", " ".join(module.get("cuda_flags", module["flags"]))))
    return rows


def devices() -> list[tuple[str, str]]:
    if not torch.cuda.is_available():
        return [("GPU", "none")]
    rows = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append((f"GPU {index}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"))
    return rows


def table(device: str) -> list[str]:
    """Return the lines of a table that shows which backends each function can use on `device`. A cell with "no (1)"
    refers to reason (1) below the table."""
    available = backends(device)
    reasons: list[str] = []
    width = max(map(len, available)) + 2
    lines = ["  " + " " * width + "".join(f"{name:<11}" for name in NAMES).rstrip()]
    for function, entries in available.items():
        cells = []
        for name in NAMES:
            entry = entries[name]
            if isinstance(entry, str):
                if entry not in reasons:
                    reasons.append(entry)
                cells.append(f"no ({reasons.index(entry) + 1})")
            else:
                cells.append("yes")
        lines.append(f"  {function:<{width}}" + "".join(f"{cell:<11}" for cell in cells).rstrip())
    return [*lines, *(f"  ({number}) {reason}" for number, reason in enumerate(reasons, 1))]


def tables() -> dict[str, list[str]]:
    """Return the tables of all devices. GPUs that support the same backends share a table. Each key of the result lists
    the devices of a table, such as "cuda:0, cuda:1", and its value holds the lines of this table."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        groups.setdefault(tuple(table(f"cuda:{index}")), []).append(f"cuda:{index}")
    return {"cpu": table("cpu")} | {", ".join(devices): list(lines) for lines, devices in groups.items()}


def main() -> None:
    for name, text in (*versions(), *build(), *devices()):
        print(f"{name:<14}{text}")
    for device, lines in tables().items():
        print(f"\nBackends on {device}", *lines, sep="\n")


if __name__ == "__main__":
    main()
