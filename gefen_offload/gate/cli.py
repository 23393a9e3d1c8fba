"""``gefen-offload gate``: run, show, selftest, manifest and baseline. Exit codes: 0 pass, 1 product failed, 2 usage, 3
box unfit, 4 evidence incomplete."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gefen_offload.gate import checkout, manifest

USAGE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands and their arguments."""
    commands = parser.add_subparsers(dest="action", required=True)

    lists = commands.add_parser("manifest", help="the mandatory lists against what is collected")
    how = lists.add_mutually_exclusive_group(required=True)
    how.add_argument("--check", action="store_true", help="say where they differ; exit 1 if they do")
    how.add_argument("--update", action="store_true", help="write them anew")
    lists.set_defaults(run=manifest_command)


def main(arguments: argparse.Namespace) -> int:
    """Run the chosen subcommand."""
    return int(arguments.run(arguments))


def the_checkout() -> Path:
    """The checkout, or an end with what to do."""
    root = checkout.root()
    if root is None:
        print("gefen-offload gate: run it from a checkout (./ci/gate)", file=sys.stderr)
        sys.exit(USAGE)
    return root


def manifest_command(arguments: argparse.Namespace) -> int:
    """Check or update the mandatory lists."""
    root = the_checkout()
    wrong = manifest.update(root) if arguments.update else manifest.check(root)
    for line in wrong[:200]:
        print(f"manifest: {line}")
    if wrong:
        print(f"manifest: {len(wrong)} things to put right")
        return 1
    sizes = {tier: len(ids) for tier, ids in manifest.load(root / "ci" / "mandatory").items()}
    print("manifest: " + ("written" if arguments.update else "the lists are exactly the collected tests"), sizes)
    return 0
