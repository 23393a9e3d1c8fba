"""Row-major access to a tensor of any strides."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gefen_offload.optim import flat


@st.composite
def strided(draw):
    """A tensor of numbered elements with permuted, sliced or broadcast-free strides, and a range of its elements."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    stride = draw(st.integers(1, 3))
    count = torch.Size(shape).numel()
    memory = torch.zeros([shape[i] for i in order] + [stride], dtype=torch.int64)
    tensor = memory[..., 0].permute([order.index(i) for i in range(len(shape))])
    tensor.copy_(torch.arange(count).view(shape))
    first = draw(st.integers(0, count))
    return tensor, first, draw(st.integers(first, count))


@given(strided())
@settings(max_examples=300, deadline=None)
def test_read(case):
    """The elements of a range are those of the contiguous tensor."""
    tensor, first, last = case
    if first < last:
        assert flat.read(tensor, first, last).tolist() == list(range(first, last))


@given(strided())
@settings(max_examples=300, deadline=None)
def test_write(case):
    """Writing a range changes the elements of that range, in order, and no other."""
    tensor, first, last = case
    flat.write(tensor, first, -torch.arange(first, last) - 1)
    expected = [-i - 1 if first <= i < last else i for i in range(tensor.numel())]
    assert tensor.reshape(-1).tolist() == expected


def test_view_is_the_tensor_s_own_memory():
    """A view of a contiguous tensor writes through; a strided one has none."""
    tensor = torch.zeros(3, 4)
    view = flat.view(tensor, 2, 7)
    assert view is not None
    view.fill_(1)
    assert tensor.sum() == 5
    assert flat.view(tensor.t(), 2, 7) is None
