"""What may be sent of a run: its page, its results and the ends of its logs, without secrets."""

from __future__ import annotations

import io
import os
import platform
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path

from sparkwright.core.http import redact_credentials
from sparkwright.core.store import Store, replacing

#: Bytes of a log that are kept, the last ones.
LOG_BYTES = 1 << 20

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY", re.IGNORECASE)
#: What introduces a secret in a log, and the secret.
_SECRET = re.compile(
    r"""((?i:\b\w*(?:token|secret|password|passwd|api[_-]?key)\b["']?\s*[:=]\s*["']?"""
    r"""|\bbearer\s+))[^\s"',;]+|\b(?:hf_|gh[opsu]_|github_pat_)\w{10,}"""
)


def pack(store: Store, archive: Path, files: Sequence[Path], began: float) -> Path:
    """
    Pack *files*, and the end of each log of the store that was written since *began*, into
    *archive*, and return it.
    """
    name = archive.name.removesuffix(".tar.gz")
    logs = store.folder("logs")
    with replacing(archive) as temporary, tarfile.open(temporary, "w:gz") as packed:
        for path in files:
            packed.add(path, f"{name}/{path.name}", filter=anonymous_member)
        for path in sorted(logs.rglob("*.log")):
            # The clock of a file system is coarser.
            if path.stat().st_mtime > began - 0.1:
                text = path.read_bytes()[-LOG_BYTES:].decode("utf-8", "replace")
                data = redacted(text).encode()
                label = path.relative_to(logs).as_posix().replace("/", "-")
                member = tarfile.TarInfo(f"{name}/logs/{label}")
                member.size = len(data)
                packed.addfile(member, io.BytesIO(data))
    return archive


def anonymous_member(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member without its owner and time."""
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    return info


def redacted(log: str) -> str:
    """
    Return *log* without credentials: those of URLs, values of variables whose names say so, and
    what looks like a token; and without the home folder and the name of this machine.
    """
    secrets = {v for n, v in os.environ.items() if _SECRET_NAME.search(n) and len(v) > 5}
    for secret in sorted(secrets, key=len, reverse=True):
        log = log.replace(secret, "***")
    log = _SECRET.sub(lambda match: f"{match[1] or ''}***", redact_credentials(log))
    for name, label in ((str(Path.home()), "~"), (platform.node(), "HOST")):
        log = re.sub(rf"(?<![\w.+-]){re.escape(name)}(?![\w.+-])", label, log) if name else log
    return log
