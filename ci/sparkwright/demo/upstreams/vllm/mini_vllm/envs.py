"""Settings that are read from the environment."""

from __future__ import annotations

import os


def max_experts() -> int:
    """Return how many experts a layer may have."""
    return int(os.environ.get("MINI_VLLM_MAX_EXPERTS", "512"))
