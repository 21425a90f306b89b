"""Kernel sources as package data, which are compiled at run time."""

from ._build_meta import __version__

__all__ = ["__version__"]
