"""Names that code generators share with the headers."""

from .formats import E2M1_VALUES, pack

__all__ = ["E2M1_VALUES", "pack"]
