"""`python -m gefen_offload.ranks doctor [--no-smoke]`."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Parse and dispatch."""
    parser = argparse.ArgumentParser(prog="python -m gefen_offload.ranks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="is this machine fit for tests on several ranks?")
    doctor.add_argument("--no-smoke", action="store_true", help="only look, start no ranks")
    arguments = parser.parse_args()
    from gefen_offload.ranks.doctor import main as examine

    return examine(smoke=not arguments.no_smoke)


if __name__ == "__main__":
    sys.exit(main())
