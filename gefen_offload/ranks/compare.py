"""Bit-exact comparison of nested values: what differs first, where, by how many units in the last place."""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """One place where two values differ; `path` is written as an expression on the value, `.element` its flat index."""

    path: str
    what: str  # "bits", "dtype", "shape", "type", "value", "keys", "length"
    left: str
    right: str
    element: tuple[int, ...] | None = None
    ulps: int | None = None
    step: int | None = None  # the first list index on the path: a trace is a list of steps
    count: int = 1  # elements that differ in this tensor

    def __str__(self) -> str:
        where = f"{self.path}" + (f" element {list(self.element)}" if self.element is not None else "")
        at = f"step {self.step}: " if self.step is not None else ""
        distance = f", {self.ulps} ulp apart" if self.ulps is not None else ""
        more = f"; {self.count} elements differ" if self.count > 1 else ""
        return f"{at}{where}: {self.what} differ: {self.left} and {self.right}{distance}{more}"


@dataclass(frozen=True)
class Comparison:
    """The answer; true when nothing differs. Its text is the report."""

    differences: tuple[Difference, ...]
    label: str = ""

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None

    def check(self) -> None:
        """Raise AssertionError with the report unless everything is identical."""
        __tracebackhide__ = True
        if self.differences:
            raise AssertionError(str(self))

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if not self.differences:
            return "identical"
        shown = "\n".join(f"  {d}" for d in self.differences[:SHOWN])
        more = len(self.differences) - SHOWN
        tail = f"\n  and {more} more" if more > 0 else ""
        return f"not identical{self.label}:\n{shown}{tail}"

    __repr__ = __str__


def identical(left: Any, right: Any, label: str = "") -> Comparison:
    """Compare raw bits, dtype and shape of nested tensors, arrays and numbers; types and values of anything else.

    Mappings may differ in order, not in keys. NaN payloads and the sign of zero count. Devices do not.
    """
    return Comparison(tuple(_walk(left, right, "value", None)), label)


def _walk(left: Any, right: Any, path: str, step: int | None) -> Iterator[Difference]:
    left, right = _as_tensor(left), _as_tensor(right)
    if _is_tensor(left) and _is_tensor(right):
        yield from _tensors(left, right, path, step)
    elif type(left) is not type(right):
        yield Difference(path, "type", _shown(left), _shown(right), step=step)
    elif isinstance(left, Mapping):
        yield from _mappings(left, right, path, step)
    elif isinstance(left, (list, tuple)):
        yield from _sequences(left, right, path, step)
    elif dataclasses.is_dataclass(left) and not isinstance(left, type):
        for field in dataclasses.fields(left):
            yield from _walk(getattr(left, field.name), getattr(right, field.name), f"{path}.{field.name}", step)
    elif isinstance(left, (float, complex)):
        yield from _numbers(left, right, path, step)
    elif left is not right and left != right:
        yield Difference(path, "value", _shown(left), _shown(right), step=step)


def _mappings(left: Mapping[Any, Any], right: Mapping[Any, Any], path: str, step: int | None) -> Iterator[Difference]:
    if left.keys() != right.keys():
        only_left, only_right = [k for k in left if k not in right], [k for k in right if k not in left]
        yield Difference(path, "keys", f"only here {only_left}", f"only here {only_right}", step=step)
    for key in left:
        if key in right:
            yield from _walk(left[key], right[key], f"{path}[{key!r}]", step)


def _sequences(left: Any, right: Any, path: str, step: int | None) -> Iterator[Difference]:
    if len(left) != len(right):
        yield Difference(path, "length", str(len(left)), str(len(right)), step=step)
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        inner = index if step is None and isinstance(left, list) else step
        yield from _walk(one, other, f"{path}[{index}]", inner)


def _numbers(left: Any, right: Any, path: str, step: int | None) -> Iterator[Difference]:
    one, other = complex(left), complex(right)
    if struct.pack("<dd", one.real, one.imag) != struct.pack("<dd", other.real, other.imag):
        ulps = abs(_ordered(left) - _ordered(right)) if isinstance(left, float) else None
        yield Difference(path, "bits", repr(left), repr(right), ulps=ulps, step=step)


def _ordered(value: float) -> int:
    """Doubles as integers in the order of the doubles, so that neighbours differ by one."""
    bits = int(struct.unpack("<q", struct.pack("<d", value))[0])
    return bits if bits >= 0 else -(bits & 0x7FFF_FFFF_FFFF_FFFF)


def _tensors(left: torch.Tensor, right: torch.Tensor, path: str, step: int | None) -> Iterator[Difference]:
    if left.dtype != right.dtype:
        yield Difference(path, "dtype", str(left.dtype), str(right.dtype), step=step)
    elif left.shape != right.shape:
        yield Difference(path, "shape", str(tuple(left.shape)), str(tuple(right.shape)), step=step)
    elif left.numel():
        one, other = as_integers(left), as_integers(right)
        unequal = one != other
        unequal = unequal.view(left.numel(), -1).any(dim=1)
        count = int(unequal.sum())
        if count:
            yield _first_element(left, right, path, step, int(unequal.nonzero()[0]), count)


def _first_element(
    left: torch.Tensor, right: torch.Tensor, path: str, step: int | None, flat: int, count: int
) -> Difference:
    one, other = (t.detach().reshape(-1)[flat] for t in (left, right))
    index, rest = [], flat
    for size in reversed(left.shape):
        index.append(rest % size)
        rest //= size
    texts = [f"{t.item()!r} (bits {_hex(t)})" for t in (one, other)]
    ulps = _tensor_ulps(one, other) if left.dtype.is_floating_point else None
    return Difference(path, "bits", texts[0], texts[1], tuple(reversed(index)), ulps, step, count)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The raw bits on the CPU as bytes, or as wider integers where the element size has one."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.view(kinds.get(plain.element_size(), torch.int64))


def _tensor_ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """Distance in representable values; each sign's values are counted from zero."""
    width = one.element_size() * 8
    ends = []
    for value in (one, other):
        bits = int(as_integers(value)[0]) & ((1 << width) - 1)
        magnitude = bits & ((1 << (width - 1)) - 1)
        ends.append(-magnitude if bits >> (width - 1) else magnitude)
    return abs(ends[0] - ends[1])


def _hex(value: torch.Tensor) -> str:
    import torch

    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    return "0x" + bytes(reversed(raw)).hex()


def _as_tensor(value: Any) -> Any:
    """NumPy arrays as tensors where torch has their dtype; DTensors as this rank's shard."""
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "fiubc":
        import numpy
        import torch

        return torch.from_numpy(numpy.array(value))
    if hasattr(value, "to_local"):
        return value.to_local()
    return value


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) < 120 else text[:117] + "..."


def feed(hasher: Any, value: Any) -> None:
    """Add a nested value's structure and raw bits to a hash."""
    value = _as_tensor(value)
    if _is_tensor(value):
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        hasher.update(as_integers(value).numpy().tobytes())
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=repr):
            hasher.update(repr(key).encode())
            feed(hasher, value[key])
    elif isinstance(value, (list, tuple)):
        hasher.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            feed(hasher, item)
    elif isinstance(value, (float, complex)):
        whole = complex(value)
        hasher.update(type(value).__name__.encode() + struct.pack("<dd", whole.real, whole.imag))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        hasher.update(f"{type(value).__name__};".encode())
        for field in dataclasses.fields(value):
            hasher.update(field.name.encode())
            feed(hasher, getattr(value, field.name))
    elif isinstance(value, (set, frozenset)):
        hasher.update(f"{type(value).__name__} {sorted(map(repr, value))};".encode())
    else:
        hasher.update(f"{type(value).__name__} {value!r};".encode())
