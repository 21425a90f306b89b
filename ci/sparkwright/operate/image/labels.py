"""What an image says of itself: the names that every registry shows, and what of the release tells one image from another."""

from __future__ import annotations

from sparkwright.operate.image.picked import Picked

OCI = "org.opencontainers.image"
#: The licences of what we build; of every other package the licence lies in its ``.dist-info``.
LICENSES = {"vllm": "Apache-2.0", "flashinfer": "Apache-2.0", "cutlass": "BSD-3-Clause", "sparkwright": "Apache-2.0"}
#: Says of the index what it was when the image was made, and nothing of what is in the image.
SERIAL = "sparkwright.index.serial"


def labels(picked: Picked, base: str) -> dict[str, str]:
    """
    Return the labels of an image of *picked*, sorted; none of them holds a date.

    Args:
        base: The base image, ``NAME@sha256:…`` or an id.
    """
    entry, release = picked.entry, picked.release
    name, _, digested = base.rpartition("@")
    found = {
        f"{OCI}.title": f"vLLM for DGX Spark, sparkwright {entry.stack}",
        f"{OCI}.version": entry.name,
        f"{OCI}.licenses": " AND ".join(sorted({LICENSES[one.fork] for one in picked.wheels if one.fork in LICENSES})),
        f"{OCI}.base.digest": digested,
        f"{OCI}.base.name": name,
        **_source(picked),
        "sparkwright.stack": entry.stack,
        "sparkwright.release": entry.name,
        "sparkwright.release.sha256": entry.release,
        "sparkwright.lock.sha256": next(lock.sha256 for lock in release.locks if lock.machine in (picked.machine, "any")),
        "sparkwright.index": picked.index.manifest.url,
        SERIAL: str(picked.index.manifest.serial),
        "sparkwright.channel": entry.channel,
        "sparkwright.proved": "no" if picked.missing else "yes",
        "sparkwright.missing": "; ".join(dict.fromkeys(f"{one.gate}: {one.state} ({one.reference})" for one in picked.missing)),
        **{f"sparkwright.wheel.{wheel.project}": wheel.sha256 for wheel in picked.wheels},
    }
    return {key: value for key, value in sorted(found.items()) if value}


def _source(picked: Picked) -> dict[str, str]:
    """Return where vLLM's source is and which commit of it, where the build knew."""
    fork = next((one for one in picked.release.forks if one.name == "vllm"), None)
    if fork is None or fork.kind != "git" or not fork.resolved:
        return {}
    url = next((word for word in fork.origin.split() if word.startswith("https://")), "")
    return {f"{OCI}.revision": fork.pin, f"{OCI}.source": url}
