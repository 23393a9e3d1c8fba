"""Loss trajectories: where two runs part."""

from __future__ import annotations

import math

import pytest

from gefen_offload.ranks import LossTrajectory

RUN = LossTrajectory.of([3.0, 2.0, 1.5, 1.25], name="resident")


def test_equal_runs():
    """The same losses do not part."""
    assert RUN.parts_from(LossTrajectory.of(list(RUN))) is None


def test_first_divergent_step():
    """The first step that differs by one bit is named with both losses."""
    other = LossTrajectory.of([3.0, 2.0, math.nextafter(1.5, 2), 9.0], name="offloaded")
    parting = RUN.parts_from(other)
    assert (parting.step, parting.left) == (2, 1.5)
    with pytest.raises(AssertionError, match="resident and offloaded part at step 2"):
        RUN.check(other)


def test_bands():
    """Within an absolute or relative band runs agree; beyond it they part at the first step outside."""
    other = LossTrajectory.of([3.01, 2.0, 1.5, 1.2])
    assert RUN.parts_from(other, absolute=0.06) is None
    assert RUN.parts_from(other, relative=0.005).step == 3
    assert RUN.parts_from(other, absolute=0.02).step == 3


def test_nan_and_infinity_are_in_no_band():
    """A NaN or an infinity equals only itself, and zero differs from minus zero where bits are asked for."""
    one = LossTrajectory.of([math.nan])
    assert one.parts_from(LossTrajectory.of([math.nan])) is None
    assert one.parts_from(LossTrajectory.of([1.0]), absolute=10).step == 0
    endless = LossTrajectory.of([math.inf])
    assert endless.parts_from(LossTrajectory.of([math.inf]), relative=1e-3) is None
    assert endless.parts_from(LossTrajectory.of([1.0]), relative=1e-3).step == 0
    assert endless.parts_from(LossTrajectory.of([-math.inf]), relative=1e-3).step == 0
    assert LossTrajectory.of([0.0]).parts_from(LossTrajectory.of([-0.0])).step == 0


def test_missing_steps():
    """A step that only one run has is where they part."""
    parting = RUN.parts_from(LossTrajectory.of([3.0, 2.0]))
    assert (parting.step, parting.right) == (2, None)
    assert "only one of the two runs has it" in str(parting)


def test_continuation():
    """A run and its continuation from a checkpoint make one trajectory; a gap is refused."""
    assert RUN.joined(LossTrajectory.of([1.5, 1.25], first=2)).losses == RUN.losses
    with pytest.raises(ValueError, match="begins at step 7"):
        RUN.joined(LossTrajectory.of([1.0], first=7))


def test_file_keeps_every_bit(tmp_path):
    """Saving and loading gives the same bits, also of values that decimal text would round or cannot name."""
    run = LossTrajectory.of([0.1, 1e-320, math.inf, -0.0, math.nan], first=3, name="n")
    run.save(tmp_path / "run.json")
    assert run.parts_from(LossTrajectory.load(tmp_path / "run.json")) is None
    assert LossTrajectory.load(tmp_path / "run.json").first == 3
