"""``python -m sparkwright``, and the program ``sparkwright``."""

import signal
import sys


def main() -> int:
    """Run the command line; an interruption while it is loaded counts once it is."""
    try:
        # One in the middle of an import can end in a fault of a C extension.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        from sparkwright.cli.main import main as run

        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
