"""A parameter's elements in row-major order, whatever its strides."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def lies_flat(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its values row by row; a negating view holds others."""
    return tensor.is_contiguous() and not tensor.is_neg()


def view(tensor: Tensor, first: int, last: int) -> Tensor | None:
    """Elements [first, last) in row-major order, 1-D, in the tensor's own memory; None if they do not lie there so."""
    return tensor.view(-1)[first:last] if lies_flat(tensor) else None


def read(tensor: Tensor, first: int, last: int) -> Tensor:
    """Elements [first, last) in row-major order, 1-D: a view of a tensor that lies so, else a copy."""
    if lies_flat(tensor):
        return tensor.view(-1)[first:last]
    return torch.cat([part.reshape(-1) for part in _parts(tensor, first, last)])


def write(tensor: Tensor, first: int, values: Tensor) -> None:
    """Store the 1-D `values` at row-major positions `first` and on."""
    if lies_flat(tensor):
        tensor.view(-1)[first : first + values.numel()].copy_(values)
        return
    done = 0
    for part in _parts(tensor, first, first + values.numel()):
        part.copy_(values[done : done + part.numel()].view(part.shape))
        done += part.numel()


def _parts(tensor: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """Views that hold elements [first, last) in order: the rest of a row, whole rows, the start of a row."""
    if first >= last:
        return
    if tensor.dim() <= 1:
        yield tensor.reshape(-1)[first:last] if tensor.dim() else tensor.view(1)
        return
    row = tensor[0].numel()
    head, tail = -(-first // row), last // row
    if head > tail:  # inside one row
        yield from _parts(tensor[tail], first - tail * row, last - tail * row)
        return
    if head * row > first:
        yield from _parts(tensor[head - 1], first - (head - 1) * row, row)
    if tail > head:
        yield tensor[head:tail]
    if last > tail * row:
        yield from _parts(tensor[tail], 0, last - tail * row)
