"""Two CUDA extension libraries and what prepares their inputs."""

from ._version import __version__

__all__ = ["__version__"]
