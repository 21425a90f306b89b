"""
The index: static pages for pip, uv and people, all of which follow from the signed manifest and the records that it names.

`generate` makes a generation of them, `flip` puts it live by one rename, `current` says what is live, and `check` reads everything again.
"""

from __future__ import annotations

from sparkwright.release.index.generation import generate
from sparkwright.release.index.live import current, flip
from sparkwright.release.index.whole import check

__all__ = ["check", "current", "flip", "generate"]
