"""Measure the optimizers on this machine, side by side, within one process.

Steps are timed synchronised, after a first step and others to warm up; an offloaded one is compared with bare copies of
the same bytes through the same slots. An optimizer that is not installed is named as absent.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gefen_offload.bench import report
from gefen_offload.bench.contestants import contestants
from gefen_offload.bench.results import Entry, Results
from gefen_offload.bench.runner import MIB, Plan, run
from gefen_offload.bench.workloads import SIZES, NetworkShape

SECTIONS = ("together", "A", "B", "sizes", "tensors", "staging")
NO_GPU = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gefen-offload bench`."""
    told = f"of {', '.join(SECTIONS)}; all by default (`bench ranks` is another command: what the rank harness costs)"
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=told)
    parser.add_argument("--quick", action="store_true", help="workload A, fewer steps, sizes up to 350M")
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N, or cpu for a smoke test")
    parser.add_argument(
        "--sizes", default=",".join(SIZES), help="sizes to scale over, comma separated (default: %(default)s)"
    )
    parser.add_argument(
        "--staging", type=int, default=24, metavar="MIB", help="size of a window (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=10, help="steps timed (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="only optimizers whose name has this"
    )
    parser.add_argument("--world", type=int, default=2, help="GPUs of `together` (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for bench.json and the plots")


def main(args: argparse.Namespace) -> int:
    """Run the bench and return the exit code: 0, or 2 where there is no GPU or a choice is wrong."""
    problem = problem_of(args)
    if problem:
        print(f"bench: {problem}", file=sys.stderr)
        return NO_GPU
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench: there is no CUDA GPU here; `--device cpu` runs a smoke test", file=sys.stderr)
        return NO_GPU
    results = Results(machine_of(device))
    for entry in run(plan_of(args, device)):
        results.entries.append(entry)
        print(
            f"  {entry.workload:12} {entry.name:32} {_brief(entry)}",
            flush=True,
        )
    report.print_table(results)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        for path in (report.write_json(results, args.out), *report.draw(results, args.out)):
            print(f"wrote {path}")
        if importlib.util.find_spec("matplotlib") is None:
            print("no plots: matplotlib is not installed")
    return 0


def problem_of(args: argparse.Namespace) -> str:
    """What is wrong with the options; empty if nothing."""
    wrong = [s for s in args.sections if s not in SECTIONS] + [s for s in args.sizes.split(",") if s not in SIZES]
    if wrong:
        known = f"sections are {', '.join(SECTIONS)}; sizes are {', '.join(SIZES)}"
        return f"there is no {', '.join(map(repr, wrong))}; {known}"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", args.device):
        return f"--device {args.device}: cuda, cuda:N or cpu"
    if args.device == "cpu" and args.sections:
        return f"--device cpu runs a smoke test and no section; {', '.join(args.sections)}: on a GPU only"
    if args.repeats < 1 or args.staging < 1:
        return f"--repeats {args.repeats} --staging {args.staging}: both are at least 1"
    names = [contestant.name for contestant in contestants(MIB)]
    strange = [part for part in args.only if not any(part in name for name in names)]
    return f"--only {strange[0]}: none of {'; '.join(names)}" if strange else ""


def plan_of(args: argparse.Namespace, device: torch.device) -> Plan:
    """The plan that the options ask for."""
    sections: Sequence[str] = args.sections or (("A", "sizes") if args.quick else SECTIONS)
    sizes = args.sizes.split(",")
    return Plan(
        device=device,
        sections=tuple(sections) if device.type == "cuda" else ("smoke",),
        sizes=tuple(s for s in sizes if s in ("10M", "100M", "350M")) if args.quick else tuple(sizes),
        stagings=tuple(mib * MIB for mib in (2, 4, 8, 16, 24, 32)),
        counts=(8, 128, 2048, 8192),
        staging=args.staging * MIB,
        repeats=min(args.repeats, 5) if args.quick else args.repeats,
        network=NetworkShape(),
        only=tuple(args.only),
        world=args.world,
        timelines=args.out is not None,
    )


def machine_of(device: torch.device) -> dict[str, object]:
    """What the numbers hold for."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}


def _brief(entry: Entry) -> str:
    return f"{entry.step.median * 1e3:.2f} ms" if entry.step is not None else str(entry.absent)
