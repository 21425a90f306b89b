"""What a measurement is about: the wheel that served, the model that it served, and the machine."""

from __future__ import annotations

import msgspec


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    One server as the caller knows it; a server cannot tell these of itself.

    Attributes:
        wheel: The sha256 of the wheel that it was installed from; empty where that is not known.
        model: A digest over the files of the model; empty where that is not known, and then the model's name has to do.
        host: Facts of the machine that bear on the numbers (GPU, driver), by name.
    """

    wheel: str = ""
    model: str = ""
    host: dict[str, str] = {}


def same_model(one: Served, one_name: str, other: Served, other_name: str) -> bool:
    """Return whether two servers serve the same model: by digest where both are known, else by the last part of the served name."""
    if one.model and other.model:
        return one.model == other.model
    return one_name.rstrip("/").rpartition("/")[2] == other_name.rstrip("/").rpartition("/")[2]
