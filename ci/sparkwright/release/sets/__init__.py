"""
The matched set of a release: our wheels and everything that they need, as one lock for each kind of machine.

`read` and `select` are the client's half and need nothing but `packaging`; `resolve` asks uv.
"""

from sparkwright.release.sets.lock import Pinned, SetLock, read, select
from sparkwright.release.sets.resolving import PYTHONS, Resolved, of_stack, resolve

__all__ = ["PYTHONS", "Pinned", "Resolved", "SetLock", "of_stack", "read", "resolve", "select"]
