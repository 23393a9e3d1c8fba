"""Reading the machine: a driver that answers, none at all, and what is passed on."""

from __future__ import annotations

import json
import os

import pytest

from gefen_offload.gate import facts
from gefen_offload.gate.selftest.case import released

SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) printf '0, GPU-a, Imaginary 9, 1.0, 81000, 1000\\n1, GPU-b, Imaginary 9, 1.0, 81000, 0\\n' ;;
  --query-compute*) printf 'GPU-b, 4711, python, 300\\nGPU-z, 1, other, 5\\n' ;;
  *) echo "GPU0 X NV18" ;;
esac
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A machine with two GPUs, as nvidia-smi tells it."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("GEFEN_RANKS_INVENTORY", raising=False)


def test_gpus_are_read_without_cuda(driver):
    """UUID, free memory and who else is there come from the driver's own program."""
    found = facts.gpus()
    assert [(gpu.uuid, gpu.free_mib, gpu.driver) for gpu in found] == [("GPU-a", 80000, "1.0"), ("GPU-b", 81000, "1.0")]
    assert facts.foreign_processes(found) == ("process 4711 (python) on GPU-b, 300 MiB",)


def test_only_visible_gpus_count(driver, monkeypatch):
    """CUDA_VISIBLE_DEVICES narrows what the gate sees, and whose processes disturb it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.uuid for gpu in facts.gpus()] == ["GPU-a"]
    assert facts.foreign_processes(facts.gpus()) == ()


def test_a_simulated_inventory_is_not_believed(driver, monkeypatch, tmp_path):
    """The file that stands in for GPUs in tests of leases does not give the gate any."""
    (tmp_path / "gpus.json").write_text('["SIM-1", "SIM-2", "SIM-3"]')
    monkeypatch.setenv("GEFEN_RANKS_INVENTORY", str(tmp_path / "gpus.json"))
    assert [gpu.uuid for gpu in facts.gpus()] == ["GPU-a", "GPU-b"]


def test_no_driver_is_no_gpu(monkeypatch, tmp_path):
    """Without nvidia-smi there are no GPUs, and that is no error."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.gpus() == ()
    assert facts.topology() == ""


def test_an_interpreter_without_torch(tmp_path):
    """An interpreter that cannot import torch is on record as one without it."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    assert facts.software(str(program)).torch is None


def test_facts_survive_json(tmp_path):
    """Facts written as JSON and read back are the same facts."""
    before = released(tmp_path).before
    assert facts.from_json(json.loads(json.dumps(facts.to_json(before)))) == before
