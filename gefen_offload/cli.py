"""The ``gefen-offload`` command: ``gate``, ``doctor``, ``test`` and ``bench``, each loaded only when asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from gefen_offload import __version__

COMMANDS = {
    "gate": ("gefen_offload.gate.cli", "may it ship: run, show, selftest, drill, manifest, baseline"),
    "test": ("gefen_offload.gate.checks", "lint, types and the tests that need no GPU"),
    "doctor": ("gefen_offload.gate.doctor", "what this machine can validate, and what is in the way"),
    "bench": ("gefen_offload.bench.cli", "ratios measured within one process"),
}
USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv`` without the program's name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"gefen-offload {__version__}")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        return usage(arguments)
    command, rest = arguments[0], arguments[1:]
    home = COMMANDS[command][0]
    if command == "bench" and rest[:1] == ["ranks"]:
        home, rest = "gefen_offload.bench.ranks", rest[1:]
        command = "bench ranks"
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __package__:
            raise
        where = "pip install 'gefen_offload[gate]', or '.[gate]' in a checkout"
        print(f"gefen-offload {command} needs {error.name}: {where}", file=sys.stderr)
        return USAGE
    parser = argparse.ArgumentParser(prog=f"gefen-offload {command}", description=module.__doc__)
    module.add_arguments(parser)
    return int(module.main(parser.parse_args(rest)))


def usage(arguments: Sequence[str]) -> int:
    """Say what there is; asking for help is no error."""
    asked = arguments[:1] in ([], ["-h"], ["--help"])
    lines = [f"  {name:8} {says}" for name, (_, says) in COMMANDS.items()]
    if not asked:
        print(f"gefen-offload: there is no command {arguments[0]!r}", file=sys.stderr)
    print(
        "usage: gefen-offload COMMAND ... | --version\n\n" + "\n".join(lines), file=sys.stdout if asked else sys.stderr
    )
    return 0 if arguments and asked else USAGE


if __name__ == "__main__":
    sys.exit(main())
