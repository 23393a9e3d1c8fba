"""Counting GPUs without CUDA."""

from __future__ import annotations

from shlex import quote

import pytest

from gefen_offload.ranks import inventory

GPUS = "0, GPU-aaa, NVIDIA H200, 580.1, 143771, 4\n1, GPU-bbb, NVIDIA H200, 580.1, 143771, 9000\n"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an `nvidia-smi` in the path that prints what it is told and exits with the given code."""

    def put(gpus: str = GPUS, processes: str = "", code: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        said = f"case $1 in *compute-apps*) printf %s {quote(processes)};; *) printf %s {quote(gpus)};; esac"
        script.write_text(f"#!/bin/sh\n{said}\nexit {code}\n")
        script.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(inventory.SIMULATED, raising=False)
    return put


def test_what_it_reads(smi):
    """UUID, name, driver and memory of every GPU."""
    smi()
    found = inventory.inventory()
    assert [g.uuid for g in found.gpus] == ["GPU-aaa", "GPU-bbb"]
    assert found.gpus[1] == inventory.Gpu(1, "GPU-bbb", "NVIDIA H200", "580.1", 143771, 9000)
    assert not found.simulated
    assert "torch" not in vars(inventory)


def test_no_driver(smi):
    """Without nvidia-smi, or when it fails, there are no GPUs and the reason is kept."""
    assert inventory.inventory().problem == "nvidia-smi is not installed"
    smi("NVIDIA-SMI has failed\n", code=9)
    assert inventory.inventory().gpus == ()
    assert "code 9: NVIDIA-SMI has failed" in inventory.inventory().problem


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("1,0", ["GPU-bbb", "GPU-aaa"]),
        ("GPU-b", ["GPU-bbb"]),
        ("", []),
        ("0,7,1", ["GPU-aaa"]),
        ("0,0", ["GPU-aaa"]),
        ("GPU-", []),
        ("-1", []),
    ],
)
def test_visible_devices(smi, monkeypatch, visible, uuids):
    """CUDA_VISIBLE_DEVICES by number, UUID or its beginning; as CUDA does, the list ends at the first bad word."""
    smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [g.uuid for g in inventory.inventory().gpus] == uuids


def test_processes(smi):
    """Who computes on which GPU; memory that the driver does not tell is None."""
    smi(processes="GPU-aaa, 41, python, 512\nGPU-bbb, 42, other, [N/A]\n")
    assert inventory.processes() == (
        inventory.GpuProcess("GPU-aaa", 41, "python", 512),
        inventory.GpuProcess("GPU-bbb", 42, "other", None),
    )
