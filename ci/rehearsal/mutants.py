"""
Make an environment with a fault from the candidate's, for the gate that should catch it.

    mutants.py ROOT NAME

It lies in ``ROOT/environments/NAME``. Faults but ``byte`` and ``eager`` are those of the plugin in
``tests/server/faulty``, which the environment then holds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

#: Name → what the plugin does. A rate of 0.0008 changed 3.8 of a hundred answers of G4 [measured],
#: so that 0.00021 and 0.00105 change about one and five. Token 187 of the trained models is the
#: byte 0xff, half a character wherever it stands. Of the large model's step on an H200, 310,000
#: cycles were 2.4 %, and 31 million made it 3.55 times as long [measured]. Two computations with
#: Triton took 54 % of the experts' time, so that three take 64 %.
FAULTS: dict[str, dict[str, object]] = {
    "scale": {"fault": "wrong-scale", "factor": 1.25},
    "scale-4": {"fault": "wrong-scale", "factor": 4},
    "cache": {"fault": "poisoned-cache"},
    "fallback": {"fault": "fallback", "times": 3},
    "fallback-batch": {"fault": "fallback", "times": 2, "least": 2, "most": 16},
    "dirty-1": {"fault": "random-tokens", "rate": 0.00021, "drafts": 0, "token": 187},
    "dirty-5": {"fault": "random-tokens", "rate": 0.00105, "drafts": 0, "token": 187},
    "slow": {"fault": "slow", "cycles": 390_000},
    "slow-4": {"fault": "slow", "cycles": 36_500_000},
}
#: The server computes without CUDA graphs.
EAGER = "import sys; 'serve' in sys.argv and sys.argv.append('--enforce-eager')\n"


def main() -> None:
    """Make the environment that the command line names."""
    root, name = Path(sys.argv[1]), sys.argv[2]
    source, target = (root / "environments" / each for each in ("candidate", name))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)
    (site,) = target.glob("lib/python3*/site-packages")
    if name == "eager":
        (site / "eager.pth").write_text(EAGER, "utf-8")
        return
    if name == "byte":
        # After the audit, in a section of the library that nothing reads.
        library = next(site.glob("vllm/_C_stable_libtorch*.so"))
        changed = library.read_bytes().replace(b"GCC: (", b"gCC: (", 1)
        library.unlink()
        library.write_bytes(changed)
        return
    shutil.copytree(root / "program" / "tests" / "server" / "faulty", site, dirs_exist_ok=True)
    file = target / "fault.json"
    file.write_text(json.dumps(FAULTS[name]), "utf-8")
    line = f"import os; os.environ.setdefault('SPARKWRIGHT_TEST_FAULT_FILE', {str(file)!r})\n"
    (site / "fault.pth").write_text(line, "utf-8")


if __name__ == "__main__":
    main()
