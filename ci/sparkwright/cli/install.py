"""The commands on installed releases, which are those of `sparkwright.client.main`."""

from sparkwright.client.main import add_arguments

__all__ = ["add_arguments"]
