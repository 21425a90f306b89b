"""Kernel sources as package data."""

from ._build_meta import __version__
from .jit import include_folder, sources

__all__ = ["__version__", "include_folder", "sources"]
