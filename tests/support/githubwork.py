"""
GitHub's API of issues, git objects and pull requests, as a real server on a real bare repository.

It follows https://docs.github.com/rest: objects are made by git itself, so a commit that comes of a proposal can be checked out; an issue
belongs to the account whose token filed it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support import loopback
from tests.support.loopback import page

TOKEN = "ghs_WORKWORKWORKWORKWORKWORK"
REPOSITORY = "acme/wheels"


@dataclasses.dataclass
class World:
    """
    What the server knows.

    Attributes:
        path: The bare repository behind it.
        asked: Method and path of each request, in order.
        runs: The runs of pipeline.yml, newest first, each with its jobs.
    """

    path: Path
    issues: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pulls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    runs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    asked: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    user: str = "github-actions[bot]"
    url: str = ""

    def git(self, *words: str, data: bytes = b"") -> str:
        """Run git in the repository."""
        env = {"PATH": os.environ["PATH"], **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}}
        done = subprocess.run(["git", *words], cwd=self.path, input=data, capture_output=True, check=False, env=env)
        if done.returncode:
            raise LookupError(done.stderr.decode())
        return done.stdout.decode().strip()

    def file(self, title: str, body: str, user: str) -> dict[str, Any]:
        """File an issue as *user*."""
        return self.add(self.issues, "issues", title=title, body=body, user={"login": user})

    def add(self, records: list[dict[str, Any]], kind: str, **fields: Any) -> dict[str, Any]:
        """Add an open issue or pull request to *records*."""
        number = len(self.issues) + len(self.pulls) + 1
        records.append({"number": number, "state": "open", **fields, "html_url": f"{self.url}/{REPOSITORY}/{kind}/{number}"})
        return records[-1]


class Handler(loopback.Handler):
    server: Server

    def serve(self) -> None:
        world, parts = self.server.world, urlsplit(self.path)
        sent = json.loads(self.body() or b"{}")
        with self.server.lock:
            world.asked.append((self.command, self.path))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"message": "Requires authentication"})
                return
            match = re.fullmatch(rf"/repos/{REPOSITORY}(/.+)", unquote(parts.path))
            try:
                status, record = self._route(match[1] if match else "", sent, parse_qs(parts.query))
            except LookupError as error:
                status, record = 422, {"message": str(error)}
        with contextlib.suppress(OSError):
            self.answer(status, record)

    do_GET = do_POST = do_PATCH = serve  # noqa: N815  http.server calls them so

    def _route(self, path: str, sent: dict[str, Any], query: dict[str, list[str]]) -> tuple[int, Any]:
        world = self.server.world
        routes: list[tuple[str, str, Callable[..., tuple[int, Any]]]] = [
            ("GET", "/issues", lambda: (200, page([one for one in world.issues if one["state"] == "open"] + world.pulls, query))),
            ("POST", "/issues", lambda: (201, world.file(sent["title"], sent["body"], world.user))),
            ("PATCH", r"/issues/(\d+)", lambda number: self._change(world.issues, int(number), sent)),
            ("GET", "/git/commits/([0-9a-f]{40})", lambda commit: (200, self._commit(commit))),
            ("POST", "/git/blobs", lambda: (201, {"sha": world.git("hash-object", "-w", "--stdin", data=base64.b64decode(sent["content"], validate=True))})),
            ("POST", "/git/trees", lambda: (201, {"sha": self._tree(sent)})),
            ("POST", "/git/commits", lambda: (201, self._commit(self._made(sent)))),
            ("POST", "/git/refs", lambda: self._set(sent["ref"], sent["sha"], "0" * 40)),
            ("PATCH", "/git/refs/heads/(.+)", lambda name: self._set(f"refs/heads/{name}", sent["sha"])),
            ("GET", "/pulls", lambda: (200, page(self._pulls(query), query))),
            ("POST", "/pulls", lambda: (201, self._pull(sent))),
            ("PATCH", r"/pulls/(\d+)", lambda number: self._change(world.pulls, int(number), sent)),
            ("GET", "/actions/workflows/pipeline.yml/runs", lambda: (200, {"workflow_runs": page(world.runs, query)})),
            ("GET", r"/actions/runs/(\d+)/jobs", lambda number: (200, {"jobs": page(next(run["jobs"] for run in world.runs if run["id"] == int(number)), query)})),
        ]
        found = self.route(routes, path)
        return found[0](*found[1]) if found else (404, {"message": "Not Found"})

    def _change(self, records: list[dict[str, Any]], number: int, sent: dict[str, Any]) -> tuple[int, Any]:
        one = next(one for one in records if one["number"] == number)
        one.update(sent)
        return 200, one

    def _commit(self, commit: str) -> dict[str, Any]:
        git = self.server.world.git
        parents = git("rev-list", "--parents", "-n1", commit).split()[1:]
        return {"sha": commit, "tree": {"sha": git("rev-parse", f"{commit}^{{tree}}")}, "parents": [{"sha": one} for one in parents]}

    def _tree(self, sent: dict[str, Any]) -> str:
        git = self.server.world.git
        git("read-tree", sent["base_tree"])
        rows = (f"{entry['mode'] if entry['sha'] else 0} {entry['sha'] or '0' * 40}\t{entry['path']}\n" for entry in sent["tree"])
        git("update-index", "--index-info", data="".join(rows).encode())
        return git("write-tree")

    def _made(self, sent: dict[str, Any]) -> str:
        parents = [word for one in sent["parents"] for word in ("-p", one)]
        return self.server.world.git("commit-tree", sent["tree"], *parents, "-m", sent["message"])

    def _set(self, ref: str, commit: str, *before: str) -> tuple[int, Any]:
        self.server.world.git("update-ref", ref, commit, *before)
        return 200, {"object": {"sha": commit}}

    def _pulls(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        wanted = query["head"][0].partition(":")[2], query["base"][0]
        found = [one for one in self.server.world.pulls if (one["head"]["ref"], one["base"]) == wanted]
        for one in found:
            one["head"]["sha"] = self.server.world.git("rev-parse", one["head"]["ref"])
        return found

    def _pull(self, sent: dict[str, Any]) -> dict[str, Any]:
        world = self.server.world
        head = {"ref": sent["head"], "sha": world.git("rev-parse", sent["head"])}
        return world.add(world.pulls, "pull", user={"login": world.user}, pull_request={}, **{**sent, "head": head})


class Server(loopback.Server):
    def __init__(self, world: World) -> None:
        super().__init__(Handler)
        self.world, self.lock = world, threading.Lock()
        world.url = self.url


@contextlib.contextmanager
def serving(world: World) -> Iterator[World]:
    """Serve *world* while the block runs."""
    with Server(world):
        yield world
