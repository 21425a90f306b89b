"""The global scales of a layer's experts, of which the largest is used for all."""

from __future__ import annotations

from array import array

#: Memory that earlier layers gave back, with what they left in it.
_freed: list[array[float]] = []


def _empty(count: int) -> array[float]:
    for index, memory in enumerate(_freed):
        if len(memory) >= count:
            return _freed.pop(index)[:count]
    return array("f", [0.0]) * count


class ExpertScales:
    """
    Scales of *experts* experts. A rank loads only the experts that it owns.
    """

    def __init__(self, experts: int) -> None:
        self.values = _empty(experts)
        self.loaded: set[int] = set()

    def load(self, expert: int, scale: float) -> None:
        """Take the scale of one expert from the checkpoint."""
        self.values[expert] = scale
        self.loaded.add(expert)

    def largest(self) -> float:
        """Return the scale that the layer uses."""
        return max(self.values)

    def free(self) -> None:
        """Give the memory back."""
        _freed.append(self.values)
