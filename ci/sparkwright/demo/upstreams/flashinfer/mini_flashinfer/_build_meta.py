"""What this release is."""

__version__ = "0.7.2"
