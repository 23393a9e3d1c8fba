"""The bench's command, its numbers and its report, where there is no GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

import gefen_offload
from gefen_offload.bench import cli, report
from gefen_offload.bench.contestants import contestants
from gefen_offload.bench.floor import Floor
from gefen_offload.bench.measure import Memory, Timing, time_steps
from gefen_offload.bench.results import Entry, Results
from gefen_offload.bench.runner import MIB
from gefen_offload.bench.timeline import Interval
from gefen_offload.bench.workloads import SIZES, Network, NetworkShape, divided, sized, workload_a


def arguments(*words: str) -> argparse.Namespace:
    """Parsed as the command parses them."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(words)


def test_smoke_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours and AdamW are measured on the CPU; the others are named with the reason why not."""
    assert cli.main(arguments("--device", "cpu", "--out", str(tmp_path), "--repeats", "2")) == 0
    entries = {entry["name"]: entry for entry in json.loads((tmp_path / "bench.json").read_text())["entries"]}
    assert entries["gefen_offload, resident"]["median"] > 0
    assert entries["torch AdamW fused"]["median"] > 0
    assert entries["gefen_offload, offloaded"]["absent"] == "needs a GPU"
    assert "gefen_offload, resident" in capsys.readouterr().out


def test_no_gpu_is_exit_code_two(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU the bench says so and exits with 2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(arguments()) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


def test_unknown_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A size that is not there is named, with those that are."""
    assert cli.main(arguments("--device", "cpu", "--sizes", "13B")) == 2
    message = capsys.readouterr().err
    assert "'13B'" in message
    assert "1.3B" in message


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--device", "toaster"), "--device toaster"),
        (("--device", "cpu", "--only", "nobody"), "--only nobody: none of gefen_offload, resident"),
        (("--device", "cpu", "--repeats", "0"), "--repeats 0"),
        (("X",), "there is no 'X'"),
        (("--device", "cpu", "A"), "--device cpu runs a smoke test and no section; A: on a GPU only"),
    ],
    ids=["device", "only", "repeats", "section", "section-on-cpu"],
)
def test_wrong_options_are_named(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that makes no sense is named, on any machine, and nothing is measured."""
    assert cli.main(arguments(*words)) == 2
    assert says in capsys.readouterr().err


def test_workload_a_is_the_anchor() -> None:
    """Workload A has 1,311,621,120 parameters in 289 tensors."""
    assert workload_a().elements == 1_311_621_120
    assert len(workload_a().shapes) == 289


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_what_they_say(name: str) -> None:
    """Each size is within a quarter of its name."""
    stated = float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]]
    assert 0.75 < sized(name).elements / stated < 1.25


def test_divided_keeps_the_elements() -> None:
    """More tensors hold as many elements."""
    assert divided(8).elements == pytest.approx(divided(2048).elements, rel=0.01)


def test_network_trains() -> None:
    """Workload B's network has a loss that its gradient lowers."""
    torch.manual_seed(0)
    shape = NetworkShape(width=32, layers=1, vocabulary=64, heads=2, batch=2, length=8)
    network = Network(shape, torch.device("cpu"), torch.float32)
    tokens = torch.randint(64, (2, 9))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = network(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_median_and_spread() -> None:
    """The spread is the interquartile range."""
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert timing.median == 3.0
    assert timing.spread == pytest.approx(50.5)


def test_steps_are_counted() -> None:
    """Warm-up steps are run and not timed."""
    calls: list[int] = []
    timing = time_steps(lambda: calls.append(1), torch.device("cpu"), warmup=2, repeats=3)
    assert (len(calls), len(timing.samples)) == (5, 3)


def entry(**changes: object) -> Entry:
    """An offloaded entry: 100 bytes in 2 s, over a floor of 200 bytes in 2 s."""
    floor = Floor(nbytes=200, slot_bytes=10, seconds=2.0, in_alone=1.0, out_alone=1.0)
    whole = {"step": Timing((2.0,)), "memory": Memory(1, 2), "streamed": 100, "floor": floor} | changes
    return Entry("A", "ours", 100, 3, **whole)  # type: ignore[arg-type]


def test_fraction_of_the_floor() -> None:
    """The floor is scaled to the bytes that a step streams."""
    assert entry().floor_fraction == pytest.approx(2.0)
    assert entry().each_way == pytest.approx(50.0)
    assert entry(floor=None).floor_fraction is None


def test_versions_are_those_of_what_is_measured() -> None:
    """Ours are of this package's version, torch's of torch's."""
    versions = {contestant.name: contestant.version() for contestant in contestants(MIB) if contestant.package is None}
    assert versions.pop("torch AdamW fused") == torch.__version__
    assert set(versions.values()) == {gefen_offload.__version__}


def test_table_without_rich() -> None:
    """The plain table has a line for each entry, and says why one is absent."""
    results = Results({"device": "x"}, [entry(), Entry("A", "other", absent="not installed")])
    lines = report.table(results).splitlines()
    assert len(lines) == 4
    assert "2000.00" in lines[2]
    assert "not installed" in lines[3]


def test_plots(tmp_path: Path) -> None:
    """Two sizes make one plot."""
    many = [Entry(name, "ours", n, 3, step=Timing((1.0,))) for name, n in (("10M", 10**7), ("100M", 10**8))]
    assert [path.name for path in report.draw(Results({}, many), tmp_path)] == ["parameters.png"]


def test_missing_plots_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Who asks for a folder of results and has no matplotlib is told why there are no plots."""
    monkeypatch.setattr(cli, "run", lambda plan: [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(arguments("--device", "cpu", "--out", str(tmp_path))) == 0
    assert "no plots: matplotlib is not installed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are fewer GPUs than ranks asked for, the entry says how many are needed and found."""
    from gefen_offload.bench import together
    from gefen_offload.ranks.inventory import Inventory

    monkeypatch.setattr(together, "inventory", lambda: Inventory(()))
    (found,) = together.together(2, "1.3B", 2**24, 3)
    assert found.absent == "needs 2 GPUs, found 0"


def test_timeline(tmp_path: Path) -> None:
    """An entry with a timeline is drawn in three lanes."""
    steps = (Interval("copy in", 0.0, 1.0), Interval("update", 1.0, 1.5), Interval("copy out", 1.5, 2.5))
    drawn = report.draw(Results({}, [entry(timeline=steps)]), tmp_path)
    assert [path.name for path in drawn] == ["timeline.png"]
