"""Failures of operate, with their references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sparkwright.core.errors import Advice, SparkwrightError


class LabError(SparkwrightError):
    """A runner of a lab cannot take or finish a job."""

    references: ClassVar[Mapping[str, Advice]] = {
        "night-taken": Advice(
            "A record of that day, stack and run is there already, and says something else: two jobs of one run record the same stack.",
            "Record each stack of a run once; the record that is there stays as it is.",
        ),
        "record-damaged": Advice(
            "A record of a run, of drift or of a status is no such record, is cut off, or "
            "has another name than it gives itself.",
            "Take it from the artifacts of the run that made it, or remove it; the site "
            "shows it as damaged until then.",
        ),
    }
