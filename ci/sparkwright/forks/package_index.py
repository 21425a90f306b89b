"""
The package index: which file it offers, and where.

The index is the one that pip and uv of this user would ask, so that a lab's own mirror works
without a word to us. Locks hold names and hashes, never addresses.
"""

from __future__ import annotations

import os

import msgspec

from sparkwright.core import http
from sparkwright.core.console import one_line
from sparkwright.core.http import HttpFailure
from sparkwright.forks.errors import SourceError

#: In the order in which they are asked.
VARIABLES = ("SPARKWRIGHT_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
#: Bytes of the largest page; those of projects with thousands of files have some ten million.
LARGEST_PAGE = 64 << 20


class IndexFile(msgspec.Struct, frozen=True):
    """
    A file that the index offers; *sha256* and *day* (of its upload, UTC) are empty where the index
    states none.
    """

    name: str
    url: str
    sha256: str
    day: str = ""


def index_url() -> str:
    """
    Return the address of the simple index (PEP 503, PEP 691): from the environment, else PyPI's.
    """
    for variable in VARIABLES:
        if value := os.environ.get(variable):
            return (
                value.split("=", 1)[1]
                if variable == "UV_DEFAULT_INDEX" and value.split("://", 1)[0].count("=")
                else value
            )
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return str(PYPI_SIMPLE_ENDPOINT)


def files(project: str) -> tuple[IndexFile, ...]:
    """
    Return every file that the index offers for *project*.

    Raises:
        source-unreachable: The index does not answer, or has no such project.
    """
    from packaging.utils import canonicalize_name
    from pypi_simple import ACCEPT_ANY, ProjectPage, UnsupportedRepoVersionError

    index = http.redact_credentials(index_url())
    url = f"{index_url().rstrip('/')}/{canonicalize_name(project)}/"
    try:
        reply = http.request(
            "GET",
            url,
            headers={"Accept": ACCEPT_ANY},
            redirects="any",
            netrc=True,
            limit=LARGEST_PAGE,
        )
        if reply.status in (404, 410):
            raise SourceError(
                "source-unreachable", f"The index at {index} has no project {project!r}."
            )
        if reply.status != 200:
            raise HttpFailure("status", f"answered {reply.status}", reply.status)
        if "json" in reply.headers.get("content-type", ""):
            page = ProjectPage.from_json_data(msgspec.json.decode(reply.body), reply.url)
        else:
            page = ProjectPage.from_html(project, reply.body, reply.url)
    # A page of another form raises whatever the parser meets.
    except (
        HttpFailure,
        UnsupportedRepoVersionError,
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ) as error:
        what = f"The index at {index} does not answer for {project!r}."
        details = [one_line(http.redact_credentials(str(error)), 300)]
        raise SourceError("source-unreachable", what, details=details) from None
    return tuple(
        IndexFile(
            file.filename,
            file.url,
            (file.digests or {}).get("sha256", ""),
            f"{file.upload_time:%Y-%m-%d}" if file.upload_time else "",
        )
        for file in page.packages
    )


def find(project: str, filename: str) -> IndexFile:
    """
    Return where the index offers *filename* of *project*.

    Raises:
        source-unreachable: The index does not answer, or does not have the file.
    """
    for file in files(project):
        if file.name == filename:
            return file
    index = http.redact_credentials(index_url())
    raise SourceError("source-unreachable", f"The index at {index} does not offer {filename}.")
