"""Prints the details that a bug report needs: python -m streamkl.env_report"""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

import streamkl

from . import _library as lib


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def report() -> str:
    """Versions, devices, kernels and settings of this process, one per line."""
    calls = lib.library()
    lines = {
        "streamkl": streamkl.__version__,
        "library": f"{lib.library_path()}",
        "build": calls.skl_build_info().decode(),
        "CPU features": calls.skl_cpu_features().decode(),
        "cores": str(len(os.sched_getaffinity(0))),
        "Python": f"{sys.version.split()[0]} on {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "transformers": _version_of("transformers"),
    }
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        lines[f"GPU {index}"] = f"{properties.name}, {capability}, {properties.total_memory >> 20} MiB"
    for kernel in lib.kernels():
        lines[f"kernel {kernel.name}"] = kernel.detail if kernel.usable else f"not usable: {kernel.detail}"
    for name in sorted(key for key in os.environ if key.startswith("STREAMKL_")):
        lines[f"${name}"] = os.environ[name]
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines.items())


if __name__ == "__main__":
    print(report())
