"""
Release notes, made from the records of a release and from nothing else: the same records give the same text.

`markdown` is for a file and for the page of a host, `html` is a fragment for the index's own page. `sparkwright.release.notes.needs`
asks upstream, before a release is made, which of its patches are still needed.
"""

from __future__ import annotations

from sparkwright.release.notes.rendered import html, markdown

__all__ = ["html", "markdown"]
