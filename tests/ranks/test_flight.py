"""Reading torch's flight recorder."""

from __future__ import annotations

import json

from gefen_offload.ranks.flight import summary


def recorded(*numbers: int, group: tuple[str, str] = ("0", "default_pg"), name: str = "gloo:all_reduce") -> str:
    entries = [
        {
            "process_group": list(group),
            "collective_seq_id": n,
            "p2p_seq_id": 0,
            "profiling_name": name,
            "input_sizes": [[n]],
        }
        for n in numbers
    ]
    return json.dumps({"entries": entries})


def test_a_rank_behind():
    """The rank whose last collective has a smaller number did not enter the newest one."""
    lines = summary({0: recorded(1, 2, 3), 1: recorded(1, 2)})
    assert lines[0].endswith(
        "rank 0 at gloo:all_reduce number 3 of sizes [[3]], rank 1 at gloo:all_reduce number 2 of sizes [[2]]"
    )
    assert (
        lines[1] == "flight recorder, group 0 default_pg: rank 1 did not enter gloo:all_reduce number 3 of sizes [[3]]"
    )


def test_a_rank_that_entered_nothing():
    """In the default group a rank without entries is behind; in another group it may not be a member."""
    assert "rank 1 did not enter" in summary({0: recorded(1), 1: recorded()})[1]
    assert len(summary({0: recorded(1, group=("1", "mesh")), 1: recorded()})) == 1


def test_level_ranks():
    """Ranks at the same collective: one line, nobody behind."""
    assert len(summary({0: recorded(4), 1: recorded(4)})) == 1


def test_nothing_recorded():
    """Ranks that could not answer, and broken text, make no lines."""
    assert summary({0: "", 1: "not json"}) == []
