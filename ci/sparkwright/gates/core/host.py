"""
The facts of a machine that bear on a verdict; nothing that names its owner.
"""

from __future__ import annotations

import os
import platform

import psutil

from sparkwright.builder import host_info


def facts() -> dict[str, str]:
    """Return processor, cores, memory, kernel and GPUs with their driver, by name; a machine without a GPU says so."""
    gpus = host_info.gpus()
    return {
        "processor": host_info.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.1f} GB",
        "kernel": platform.release(),
        "gpu": ", ".join(f"{gpu.name} (SM {gpu.capability})" for gpu in gpus) or "none",
        "driver": gpus[0].driver if gpus else "none",
    }
