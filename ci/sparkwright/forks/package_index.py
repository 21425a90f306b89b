"""
The package index: which file it offers, and where.

The index is the one that pip and uv of this user would ask, so that a lab's own mirror works without a word to us. Locks
hold names and hashes, never addresses.
"""

from __future__ import annotations

import os
import re

import msgspec

from sparkwright.forks.errors import SourceError

#: In the order in which they are asked.
VARIABLES = ("SPARKWRIGHT_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")


class IndexFile(msgspec.Struct, frozen=True):
    """A file that the index offers; *sha256* and *day* (of its upload, UTC) are empty where the index states none."""

    name: str
    url: str
    sha256: str
    day: str = ""


def index_url() -> str:
    """Return the address of the simple index (PEP 503, PEP 691): from the environment, else PyPI's."""
    for variable in VARIABLES:
        if value := os.environ.get(variable):
            return value.split("=", 1)[1] if variable == "UV_DEFAULT_INDEX" and value.split("://", 1)[0].count("=") else value
    from pypi_simple import PYPI_SIMPLE_ENDPOINT

    return str(PYPI_SIMPLE_ENDPOINT)


def shown(text: str) -> str:
    """Return *text*, a URL or words that hold some, as it may appear in logs: without a user's name and password."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)


def files(project: str) -> tuple[IndexFile, ...]:
    """
    Return every file that the index offers for *project*.

    Raises:
        source-unreachable: The index does not answer, or has no such project.
    """
    import requests
    from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedRepoVersionError

    from sparkwright.forks.download import http

    where = shown(index_url())
    try:
        with PyPISimple(endpoint=index_url(), session=http()) as client:
            page = client.get_project_page(project, timeout=60)
    except NoSuchProjectError as error:
        raise SourceError("source-unreachable", f"The index at {where} has no project {project!r}.") from error
    except (requests.RequestException, UnsupportedRepoVersionError, ValueError) as error:
        raise SourceError(
            "source-unreachable", f"The index at {where} does not answer for {project!r}.", details=[shown(str(error))]
        ) from error
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
    raise SourceError("source-unreachable", f"The index at {shown(index_url())} does not offer {filename}.")
