"""What this release is; written by a tool, whose quotes stay as they are."""

# fmt: off
__version__ = version = '0.33.0'
__version_tuple__ = version_tuple = (0, 33, 0)
