"""Times as manifests hold them: UTC, to the second, as text that sorts as they do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sparkwright.release.manifest.records import Time

_FORM = "%Y-%m-%dT%H:%M:%SZ"


def text(moment: datetime) -> Time:
    """Return *moment* (aware of its zone) as manifests hold it."""
    return moment.astimezone(UTC).strftime(_FORM)


def moment(time: Time) -> datetime:
    """Return what *time* says; raises ValueError where that is no time, such as a 13th month."""
    return datetime.strptime(time, _FORM).replace(tzinfo=UTC)


def now() -> Time:
    """Return this machine's clock."""
    return text(datetime.now(UTC))


def after(time: Time, days: int) -> Time:
    """Return *time* and *days* days."""
    return text(moment(time) + timedelta(days=days))


def days(begin: Time, end: Time) -> float:
    """Return how many days lie between the two; negative where *end* comes first."""
    return (moment(end) - moment(begin)) / timedelta(days=1)
