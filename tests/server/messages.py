"""
Send messages through vLLM's queue in shared memory from one process to another, and print how long they took, and the reader's CPU time.

The argument is a list of scenarios: which notifications are lost (none; arm: those that libzmq drops on Arm, within 3 ms of the last one that
it sent; all), and the seconds before each message. Run with the patched package on the path.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

NOTIFY = shm_broadcast.SpinCondition.notify


def read(handle: object, results: Any, count: int) -> None:
    """Read *count* messages, after one that starts the clock."""
    queue = shm_broadcast.MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()
    queue.dequeue()
    cpu, start, latencies = time.process_time(), time.monotonic(), []
    for _ in range(count):
        sent = queue.dequeue()
        latencies.append(time.monotonic() - sent)
    results.put({"latencies": latencies, "cpu": (time.process_time() - cpu) / (time.monotonic() - start)})


def notify(lost: str, last: list[float]) -> Callable[[shm_broadcast.SpinCondition], None]:
    """Return a notification that loses what *lost* says."""

    def lossy(self: shm_broadcast.SpinCondition) -> None:
        now = time.monotonic()
        if lost == "none" or (lost == "arm" and now - last[0] > 0.003):
            last[0] = now
            NOTIFY(self)

    return lossy


def measure(lost: str, gaps: list[float]) -> dict[str, object]:
    """Return the latency of each message, and the share of a core that the reader took."""
    shm_broadcast.SpinCondition.notify = notify(lost, [0.0])
    queue = shm_broadcast.MessageQueue(1, 1)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    reader = context.Process(target=read, args=(queue.export_handle(), results, len(gaps)))
    reader.start()
    queue.wait_until_ready()
    time.sleep(0.1)
    queue.enqueue(time.monotonic())
    for gap in gaps:
        time.sleep(gap)
        queue.enqueue(time.monotonic())
    result: dict[str, object] = results.get(timeout=60)
    reader.join()
    return result


if __name__ == "__main__":
    json.dump([measure(scenario["lost"], scenario["gaps"]) for scenario in json.loads(sys.argv[1])], sys.stdout)
