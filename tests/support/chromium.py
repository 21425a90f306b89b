"""Pages as Chromium lays them out."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path

from tests.support import loopback

#: Looks at pages without a window.
PROGRAM = shutil.which("chromium")
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--disable-extensions", "--no-proxy-server",
    "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom",
)  # fmt: skip
#: Lists the elements that reach beyond their frame, though no box around them scrolls, tables wider than a screen, and the resources that each frame loaded.
SCRIPT = """
onload = () => {
  const faults = [...document.querySelectorAll('iframe')].flatMap(frame => {
    const page = frame.contentDocument, view = frame.contentWindow;
    page.querySelectorAll('details').forEach(node => node.open = true);
    const wide = [...page.body.querySelectorAll('*')].filter(node => {
      for (let at = node; at; at = at.parentElement)
        if (['auto', 'hidden', 'scroll'].includes(view.getComputedStyle(at).overflowX)) return false;
      return node.getBoundingClientRect().right > view.innerWidth + 1;
    });
    wide.push(...[...page.querySelectorAll('table')].filter(table => table.scrollWidth > 1400));
    const loaded = view.performance.getEntriesByType('resource');
    return [...wide.map(node => node.tagName), ...loaded.map(entry => entry.name)].map(text => [frame.src, frame.width, text]);
  });
  document.querySelector('pre').textContent = JSON.stringify(faults);
};
"""


def faults_of_pages(folder: Path, pages: Sequence[str], widths: Sequence[int]) -> list[object]:
    """Return what the *pages* of *folder* load, which elements are cut off in windows of those *widths*, and complaints of Chromium."""
    frames = "".join(f'<iframe src="{page}" width="{width}" height="900"></iframe>' for page in pages for width in widths)
    (folder / "frames.html").write_text(f"<!DOCTYPE html>{frames}<pre></pre><script>{SCRIPT}</script>")
    assert PROGRAM
    with loopback.files(folder) as url:
        command = [PROGRAM, *CHROMIUM, f"{url}frames.html"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seen = re.search("<pre>(.+)</pre>", done.stdout)
    assert seen, done.stderr
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "favicon" not in line]
    return [*json.loads(unescape(seen[1])), *said]
