"""A vLLM plugin that prints one line in the log of the engine, as vLLM itself would: what SPARKWRIGHT_TEST_LINE holds."""

import os


def register() -> None:
    """Print the line; vLLM calls this in each of its processes."""
    from vllm.logger import init_logger  # type: ignore[import-not-found]  # in the server's environment alone

    init_logger("vllm.v1.worker.gpu_model_runner").info(os.environ["SPARKWRIGHT_TEST_LINE"])
