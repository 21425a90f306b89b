"""``python -m sparkwright``, and the program ``sparkwright``."""

import sys


def main() -> int:
    """Run the command line; an interruption counts from the first import on."""
    try:
        from sparkwright.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
