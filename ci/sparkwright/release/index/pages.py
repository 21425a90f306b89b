"""Pages for people: what the index holds, and each release with its verdicts. One file each, no scripts, every string escaped."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.core import console
from sparkwright.release import frame
from sparkwright.release.index.entries import Whole
from sparkwright.release.index.simple import addressed
from sparkwright.release.index.state import Known, Row
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Entry, Lock, Manifest, Wheel
from sparkwright.release.notes import rendered, words
from sparkwright.release.sets.lock import BY_HASH

ROOM = "sparkwright.release.index"

#: Releases that the front page shows wheel by wheel; of older ones it has a line.
SHOWN = 20


class Standing(msgspec.Struct, frozen=True):
    """How a release stands, for people; *shade* is a state's colour, and never says more than *word*."""

    shade: str
    sign: str
    word: str
    says: str


def standing(entry: Entry) -> Standing:
    """Return how *entry* stands."""
    if entry.yanked:
        return Standing("fail", "✗", "yanked", f"Its publisher no longer offers it: {entry.yanked}")
    if entry.channel == "verified":
        return Standing("pass", "✓", "verified", "Every required verdict about each of its wheels is a pass.")
    return Standing("inconclusive", "?", "candidate", "Not everything that the channel verified asks for was shown.")


def front(manifest: Manifest, releases: Sequence[Known]) -> bytes:
    """Return ``index.html`` of the whole index."""
    from markupsafe import Markup

    newest = list(reversed(releases))
    offered = [one for one in newest if not one.entry.yanked]
    best = next((one for one in offered if one.entry.channel == "verified"), next(iter(offered), None))
    made: str = _template("index.html").render(
        **_every(),
        title="Wheels for DGX Spark",
        url=manifest.url,
        facts=_facts(manifest),
        channels=[_channel(name, newest) for name in ("verified", "candidate")],
        best=best.entry.name if best else "",
        best_channel=best.entry.channel if best else "",
        commands=commands(best.entry, best.machines, best.rows, manifest.url) if best else (),
        releases=[_shown(one) for one in newest[:SHOWN]],
        older=Markup("".join(_line(one) for one in newest[SHOWN:])),  # noqa: S704  each field was escaped
        log=list(reversed(manifest.log))[:SHOWN],
    )
    return made.encode()


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    by = manifest.log[-1].by if manifest.log else "not recorded"
    return [
        ("Signed by", by),
        ("Serial", f"{manifest.serial}"),
        ("Made", manifest.made),
        ("To be refused after", manifest.expires),
        ("Address", manifest.url),
    ]


def _channel(name: str, releases: Sequence[Known]) -> tuple[str, int, str]:
    found = sum(one.entry.channel == "verified" or name == "candidate" for one in releases)
    says = "every required verdict is a pass" if name == "verified" else "all releases, those with something missing included"
    return name, found, says


def _shown(one: Known) -> dict[str, Any]:
    rows = [(row, addressed(row.url or places.wheel(row.sha256, row.filename), ""), console.size(row.size)) for row in one.rows]
    return {"entry": one.entry, "standing": standing(one.entry), "total": _total(one), "rows": rows}


def _line(one: Known) -> str:
    """Return the row of an old release, of which there may be thousands: a template would take most of a publication's time for them."""
    entry, stands, lacking = one.entry, standing(one.entry), sum(bool(row.missing) for row in one.rows)
    lacks = f"{lacking} of {len(one.rows)}" if lacking else "none"
    return (
        f'<tr><th scope="row"><a href="b/{escape(entry.release)}/">{escape(entry.name)}</a></th>'
        f'<td class="left"><span class="state {stands.shade}">{stands.sign} {stands.word}</span></td>'
        f'<td class="left">{escape(entry.made)}</td><td>{len(one.rows)}</td><td>{_total(one)}</td><td>{lacks}</td></tr>\n'
    )


def _total(one: Known) -> str:
    return console.size(sum(row.size for row in one.rows))


def commands(entry: Entry, machines: Sequence[str], rows: Sequence[Row], url: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return how a release is installed: a heading, and lines for a shell."""
    root = shlex.quote(f"{url}{entry.channel}/simple/")
    pins = {row.project: shlex.quote(f"{row.project}=={row.filename.split('-')[1]}") for row in rows}
    # Never by its name alone, which on another index may be somebody else's.
    installer = [f"pip install --extra-index-url {root} {pins['sparkwright']}"] if "sparkwright" in pins else []
    candidate = "" if entry.channel == "verified" else " --channel candidate"
    # The installer carries the index's address and key; without one in the release, both have to be named.
    named = "" if installer else f" --index {shlex.quote(url)} --key FILE"
    asked = f"sparkwright install{named} --into VENV --version {entry.name}{candidate}"
    found: list[tuple[str, tuple[str, ...]]] = [("With sparkwright, which checks signature, verdicts and hashes", (*installer, asked))]
    locked = [shlex.quote(url + places.requirements(entry.release, machine)) for machine in machines]
    if locked:
        found.append(("The whole matched set with pip, by hash", tuple(f"pip install {BY_HASH} {one}" for one in locked)))
        found.append(("The same with uv", tuple(f"uv pip install {BY_HASH} {one}" for one in locked)))
    if wheels := [pin for project, pin in pins.items() if project != "sparkwright"]:
        single = (f"pip install --extra-index-url {root} {wheels[-1]}", f"uv pip install --index {root} {wheels[-1]}")
        found.append(("One wheel, and whatever else then fits", single))
    return found


def release(one: Whole, known: Known, notes: str, url: str) -> bytes:
    """Return ``index.html`` of a release; *notes*: its notes, as HTML that is escaped."""
    from markupsafe import Markup

    entry = one.entry
    wheels = [(wheel, _links(one, wheel)) for wheel in one.release.wheels]
    made: str = _template("release.html").render(
        **_every(),
        title=entry.name,
        entry=entry,
        standing=standing(entry),
        facts=[
            ("Stack", entry.stack),
            ("Channel", entry.channel),
            ("Made", entry.made),
            ("Wheels", f"{len(wheels)}, {console.size(sum(wheel.size for wheel, _ in wheels))}"),
            ("Address", entry.release),
            ("Proof", entry.proof),
        ],
        commands=commands(entry, known.machines, known.rows, url),
        **_verdicts(one),
        wheels=wheels,
        locks=[_lock(entry, lock) for lock in one.release.locks],
        onsite=bool(one.release.onsite),
        signs=words.STATES,
        # Every string in it went through the escaping of the notes.
        notes=Markup(notes),  # noqa: S704
    )
    return made.encode()


def _verdicts(one: Whole) -> dict[str, Any]:
    """Return the table of verdicts: a wheel in each row, a gate in each column."""
    gates = list({gate.name: gate.title for proved in one.proved.values() for gate in proved.gates}.items())
    rows = []
    for wheel in one.release.wheels:
        proved = one.proved[wheel.sha256]
        states = {gate.name: gate.state for gate in proved.gates}
        rows.append((wheel, [states.get(name) for name, _ in gates], proved.missing))
    return {"gates": gates, "verdicts": rows}


def _links(one: Whole, wheel: Wheel) -> dict[str, Any]:
    address = addressed(wheel.url, "../../")
    found = [(evidence.kind, f"../../{places.evidence(evidence.sha256)}") for evidence in one.proved[wheel.sha256].evidence]
    return {"address": address, "size": console.size(wheel.size), "evidence": found}


def _lock(entry: Entry, lock: Lock) -> tuple[Lock, str, str]:
    names = places.lock(entry.release, lock.machine), places.requirements(entry.release, lock.machine)
    return lock, names[0].rpartition("/")[2], names[1].rpartition("/")[2]


def _every() -> dict[str, Any]:
    return {"style": frame.style(rendered.ROOM, ROOM), "program": __version__}


@functools.cache
def _template(name: str) -> Any:
    return frame.environment(ROOM, _finalized).get_template(name)


def _finalized(value: Any) -> Any:
    """Return *value* without what turns the direction of writing; lines of records have no control characters of ASCII."""
    return words.clean(value, 4000) if type(value) is str and not value.isascii() else value
