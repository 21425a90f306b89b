"""The facts of a Spark that lacks nothing to serve, as `doctor` gathers them."""

from typing import Any

from sparkwright.builder.host_info import GpuInfo

SERVING: dict[str, Any] = {
    "release": "2026.11.1, verified",
    "models": ["openai/gpt-oss-120b"],
    "cache": "/data/hub",
    "disk": 900 * 10**9,
    "gpus": (GpuInfo("NVIDIA GB10", "12.1", "580.95.05"),),
    "load": ("2,398 of 3,003 MHz, 38 W, 61 °C, 231 GB/s", ""),
    "kernel": "6.17.0-1032-nvidia",
    "boot": "root=/dev/nvme0n1p2 quiet",
    "swapped": 0,
    "displays": [],
}
