"""A plan covers every byte once, within the ring, and copies nothing that another window owns."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_offload.offload.slab import ALIGNMENT, aligned
from gefen_offload.offload.turns import ABREAST, ring_bytes_for, take_turns
from gefen_offload.offload.windows import Demand, Need, Part, cut_to_fit, plan, room_of


@st.composite
def layouts(draw):
    """The pieces of a step over state that lies in one slab, some parameters absent, and where each tensor lies."""
    needs, owned, end = [], [], 0
    for parameter in range(draw(st.integers(1, 8))):
        blocks = draw(st.integers(1, 7))
        rows = draw(st.lists(st.sampled_from([1, 3, 4, 20, 96, 160]), min_size=1, max_size=3))
        wholes = draw(st.lists(st.sampled_from([4, 40, 96]), max_size=2))
        starts = []
        for nbytes in [row * blocks for row in rows] + wholes:
            end = aligned(end)
            starts.append(end)
            owned.append((end, end + nbytes))
            end += nbytes
        if draw(st.integers(0, 4)) == 0:
            continue
        step = draw(st.integers(1, blocks))
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            parts = [
                Part(f"b{i}", 0, starts[i] + first * row, (last - first) * row, starts[i], blocks * row)
                for i, row in enumerate(rows)
            ]
            parts += [whole(f"w{i}", starts[len(rows) + i], n, whole=True) for i, n in enumerate(wholes)]
            needs.append(Need(parameter, tuple(parts)))
    return needs, owned


def whole(name, offset, nbytes, **options):
    """A part that is all of its tensor."""
    return Part(name, 0, offset, nbytes, offset, nbytes, **options)


def copies_in(window):
    """The copies in of a window, whatever they wait for."""
    return [run for arrival in window.inward for run in arrival.runs]


def bytes_of(runs):
    return Counter(byte for run in runs for byte in range(run.host, run.host + run.nbytes))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(1, 2000))
def test_every_byte_moves_once_each_way(layout, capacity):
    """Each needed byte is copied in once and out once in a step; other bytes are alignment padding, of no tensor."""
    needs, owned = layout
    planned = plan(needs, capacity)
    inward = bytes_of(run for window in planned.windows for run in copies_in(window))
    outward = bytes_of(run for window in planned.windows for run in window.outward)
    needed = {byte for need in needs for part in need.parts for byte in range(part.offset, part.offset + part.nbytes)}
    tensors = {byte for first, last in owned for byte in range(first, last)}
    assert inward == outward
    assert {byte for byte in inward if byte in tensors} == needed
    assert all(inward[byte] == 1 for byte in needed)


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(1, 2000))
def test_pieces_find_their_bytes_where_they_were_copied(layout, capacity):
    """A part's spot is inside the copy that brings it, aligned as on the host; copies of a window do not overlap."""
    needs, _ = layout
    planned = plan(needs, capacity)
    sides = set()
    for window in planned.windows:
        taken = Counter()
        for run in copies_in(window):
            if run.side:
                sides.add(run)
            else:
                assert run.host % ALIGNMENT == run.staged % ALIGNMENT
                taken.update(range(run.staged, run.staged + run.nbytes))
        assert max(taken.values(), default=1) == 1
        assert not taken or window.turn.start + max(taken) < planned.ring_bytes
        for need, spots in zip(needs[window.first : window.last], window.spots, strict=True):
            for part in need.parts:
                spot = spots[part.name]
                runs = sides if spot.side else [run for run in window.outward if not run.side]
                assert any(
                    run.host <= part.offset
                    and part.offset + part.nbytes <= run.host + run.nbytes
                    and spot.offset == run.staged + part.offset - run.host
                    for run in runs
                )


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(1, 2000))
def test_windows_keep_order_and_size(layout, capacity):
    """Windows are consecutive, cover all pieces, and exceed the capacity only for a single piece."""
    needs, _ = layout
    planned = plan(needs, capacity)
    assert [i for window in planned.windows for i in range(window.first, window.last)] == list(range(len(needs)))
    for window in planned.windows:
        used = max((run.staged + run.nbytes for run in copies_in(window) if not run.side), default=0)
        assert used <= capacity or window.last == window.first + 1


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(1, 2000))
def test_a_side_area_is_free_before_it_is_used_again(layout, capacity):
    """Who uses a side area anew has waited for the copies out of the last window that used it."""
    needs, _ = layout
    last_use = {}
    for index, window in enumerate(plan(needs, capacity).windows):
        for run in copies_in(window):
            if run.side:
                for byte in range(run.staged, run.staged + run.nbytes):
                    assert last_use.get(byte, -1) <= window.turn.after
        for spots in window.spots:
            for spot in spots.values():
                if spot.side:
                    last_use.update(dict.fromkeys(range(spot.offset, spot.offset + spot.nbytes), index))


@given(st.lists(st.integers(0, 400), max_size=30), st.integers(1, 200))
def test_windows_take_turns(sizes, capacity):
    """Each window lies within the ring, and knows of each of its bytes which window was the last to lie there."""
    ring_bytes = ring_bytes_for(sizes, capacity)
    assert ring_bytes <= max(ABREAST * aligned(capacity), aligned(max(sizes, default=0)))
    last_in = {}
    for index, (size, turn) in enumerate(zip(sizes, take_turns(sizes, ring_bytes), strict=True)):
        assert turn.start == aligned(turn.start)
        begin = 0
        for stretch in turn.stretches:
            assert begin < stretch.end
            assert {last_in.get(turn.start + byte, -1) for byte in range(begin, stretch.end)} == {stretch.after}
            begin = stretch.end
        assert begin == aligned(max(1, size))
        assert turn.start + begin <= ring_bytes
        last_in.update(dict.fromkeys(range(turn.start, turn.start + begin), index))


@pytest.mark.parametrize(
    ("sizes", "ring_bytes", "turns"),
    [
        ([96, 96, 96, 96, 96], 288, [(0, "96:-1"), (96, "96:-1"), (192, "96:-1"), (0, "96:0"), (96, "96:1")]),
        ([96, 144, 144, 144], 288, [(0, "96:-1"), (96, "144:-1"), (0, "96:0 144:1"), (144, "96:1 144:-1")]),
        ([16, 240, 96, 16], 288, [(0, "16:-1"), (16, "240:-1"), (0, "16:0 96:1"), (96, "16:1")]),
        ([16, 304, 16], 304, [(0, "16:-1"), (0, "16:0 304:-1"), (0, "16:1")]),
        ([16, 32], 48, [(0, "16:-1"), (16, "32:-1")]),
    ],
    ids=["in-turn", "two-abreast", "large-and-small", "larger-than-all", "all-of-a-small-state"],
)
def test_a_large_window_takes_the_room_of_several(sizes, ring_bytes, turns):
    """Only a window larger than the room of three full ones makes the ring larger."""
    assert ring_bytes_for(sizes, 96) == ring_bytes
    told = [(t.start, " ".join(f"{s.end}:{s.after}" for s in t.stretches)) for t in take_turns(sizes, ring_bytes)]
    assert told == turns


def test_copies_in_are_cut_where_other_windows_lay():
    """A window arrives in as many batches as windows lay in its bytes, the earliest first; each waits for its own."""
    needs = [Need(i, (whole("a", 1600 * i, size),)) for i, size in enumerate([96, 144, 144, 144, 144])]
    *_, fourth, fifth = plan(needs, 144).windows
    assert [(arrival.after, bytes_of(arrival.runs).total()) for arrival in fourth.inward] == [(0, 96), (1, 48)]
    assert [(arrival.after, bytes_of(arrival.runs).total()) for arrival in fifth.inward] == [(1, 96), (2, 48)]


def test_small_parameters_share_one_copy():
    """A hundred small parameters that lie one after another move in one copy each way."""
    needs = [Need(i, (whole("a", 64 * i, 40), whole("b", 64 * i + 48, 4))) for i in range(100)]
    (window,) = plan(needs, 2**20).windows
    assert len(copies_in(window)) == len(window.outward) == 1


def test_bytes_of_the_next_window_are_not_copied_back():
    """A tensor's first block, in the window before, is not taken for the padding between two tensors."""
    head = Need(0, (Part("a", 0, 0, 48, 0, 96), Part("b", 0, 96, 4, 96, 8)))
    tail = Need(0, (Part("a", 0, 48, 48, 0, 96), Part("b", 0, 100, 4, 96, 8)))
    for window, other in zip(plan([head, tail], 60).windows, [tail, head], strict=True):
        theirs = {byte for part in other.parts for byte in range(part.offset, part.offset + part.nbytes)}
        assert not theirs & set(bytes_of(window.outward))


@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([5, 64, 516, 2052]), st.integers(1, 3), st.integers(0, 200)),
        max_size=8,
    ),
    st.integers(200, 20000),
)
@settings(max_examples=150, deadline=None)
def test_cuts_cover_each_piece_in_order(sizes, capacity):
    """The cut pieces of a piece are consecutive and cover it; none exceeds a window that could hold a block."""
    demands = [Demand(0, blocks, row, tensors, whole) for blocks, row, tensors, whole in sizes]
    cuts = cut_to_fit(demands, capacity)
    for index, demand in enumerate(demands):
        mine = [cut for cut in cuts if cut.piece == index]
        assert [cut.first for cut in mine] == [0, *[cut.last for cut in mine[:-1]]]
        assert mine[-1].last == demand.last
        for cut in mine:
            nbytes = (cut.last - cut.first) * demand.row + demand.overhead
            assert nbytes <= capacity or cut.last == cut.first + 1
    assert [cut.piece for cut in cuts] == sorted(cut.piece for cut in cuts)


@pytest.mark.parametrize("capacity", [2**20, 3 * 2**20])
def test_large_parameters_fill_their_windows(capacity):
    """Cut to fit, a parameter of many windows leaves less than a sixteenth of each unused; the first ones are small."""
    demands = [Demand(0, 50000, 2052, 2, 0)]
    cuts = cut_to_fit(demands, capacity)
    needs = [Need(0, (Part("a", 0, cut.first * 2052, (cut.last - cut.first) * 2052, 0, 50000 * 2052),)) for cut in cuts]
    *full, _ = plan(needs, capacity).windows
    rooms = [room_of(index, capacity) for index in range(len(full))]
    assert rooms[:3] == [capacity // 8, capacity // 2, capacity]
    assert all(
        room * 15 // 16 < run.nbytes <= room for room, window in zip(rooms, full, strict=True) for run in window.outward
    )
