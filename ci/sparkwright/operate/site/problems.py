"""What could not be read, or is not to be believed: it is named on the site, never passed over."""

from __future__ import annotations

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.release.manifest.records import line


class Problem(msgspec.Struct, frozen=True):
    """*name*: of the record or the file. *reference*: of the failure; see the page of errors."""

    name: str
    reference: str
    says: str


def of(name: str, error: SparkwrightError) -> Problem:
    """Return what *error* says of the record *name*."""
    details = f" ({'; '.join(error.details[:3])})" if error.details else ""
    return Problem(line(name), error.reference, line(f"{error.what}{details}"))
