"""GitHub as a real server, as far as it is asked here: pull requests that a test answers, runs of workflows, and the files of releases."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from tests.support import loopback, processes

TOKEN = "github_pat_11RELEASERELEASERELEASE"
Answer = Callable[["Handler"], None]

#: Does what ``gh release`` does with the folder DOWNLOADS/REPOSITORY/releases/download/TAG; a draft has no address.
_GH = """
set -eu
action=$2 tag=$3
shift 3
files=() repository= draft=
while (($#)); do
    case $1 in
        --repo) repository=$2; shift ;;
        --title | --notes | --json | --jq) shift ;;
        --draft | --draft=true) draft=yes ;;
        --draft=false) draft=no ;;
        --clobber) ;;
        *) files+=("$1") ;;
    esac
    shift
done
[[ $GH_TOKEN == TOKEN ]]
folder=DOWNLOADS/$repository/releases/download/$tag
case $action in
    view)
        if [[ -d $folder ]]; then echo "false $(cat DOWNLOADS/immutable)"; elif [[ -d $folder.draft ]]; then echo "true false"; else exit 1; fi ;;
    create) mkdir -p "$folder.draft" ;;
    upload) cp "${files[@]}" "$folder.draft/" ;;
    edit) if [[ $draft == no ]]; then mv "$folder.draft" "$folder"; else mv "$folder" "$folder.draft"; fi ;;
esac
"""


class World(loopback.Server):
    """
    The server.

    Attributes:
        answer: What answers requests for pull requests and lists.
        asked: Method and path of each request, in order; *authorizations*: of each.
        runs: The workflow runs of the lab by their numbers.
        downloads: The folder of `gh`.
    """

    def __init__(self) -> None:
        super().__init__(Handler)
        self.answer: Answer = reply(404, "Not Found")
        self.asked: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        self.runs: dict[int, dict[str, Any]] = {}
        self.downloads = Path("/nowhere")
        self.lock = threading.Lock()

    def gh(self, folder: Path, *, immutable: bool = True) -> Path:
        """Return a program in *folder* that stands for GitHub's own, with a repository whose releases are *immutable*."""
        self.downloads = folder / "downloads"
        self.downloads.mkdir(parents=True)
        (self.downloads / "immutable").write_text(str(immutable).lower())
        script = _GH.replace("DOWNLOADS", str(self.downloads)).replace("== TOKEN", f"== {TOKEN}")
        return processes.script(folder / "gh", script, "/bin/bash")


class Handler(loopback.Handler):
    server: World

    def serve(self) -> None:
        world = self.server
        with world.lock:
            world.asked.append((self.command, self.path))
            world.authorizations.append(self.headers.get("Authorization", ""))
        path = unquote(urlsplit(self.path).path)
        with contextlib.suppress(OSError):
            if match := re.fullmatch(r"/repos/acme/lab/actions/runs/(\d+)", path):
                run = world.runs.get(int(match[1]))
                self.answer(200 if run else 404, run)
            elif re.fullmatch(r"/acme/wheels/releases/download/[^/]+/[^/]+", path):
                self.answer(200, (world.downloads / path[1:]).read_bytes())
            else:
                world.answer(self)

    do_GET = serve  # noqa: N815  http.server calls it so


def reply(status: int, body: bytes | str = b"", **headers: str) -> Answer:
    """Return an answer with *status*; underscores in the names of *headers* stand for hyphens."""
    data = body.encode() if isinstance(body, str) else body
    return lambda handler: handler.answer(status, data, **headers)


def run(**changes: Any) -> dict[str, Any]:
    """Return GitHub's record of a run of the lab's pipeline that ended, with *changes*."""
    return {
        "path": ".github/workflows/pipeline.yml", "head_branch": "main", "event": "schedule", "status": "completed",
        "head_repository": {"full_name": "acme/lab"}, **changes,
    }  # fmt: skip


@contextlib.contextmanager
def serve() -> Iterator[World]:
    """Yield a server that answers, without a proxy, until the block ends."""
    with World() as world, pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "PIP_CERT", "SSL_CERT_FILE"):
            patch.delenv(name, raising=False)
        yield world
