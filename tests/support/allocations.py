"""How many bytes of new tensors are alive at once while a function runs."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakBytes(TorchDispatchMode):
    """Counts the storages made inside the `with` block; `peak` is the most bytes of them alive at one moment."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._older: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        self._older |= given - self._sizes.keys()
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._hold(tensor)
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._older:
            return
        self._sizes[address] = storage.nbytes()
        self._holders[address] += 1
        weakref.finalize(tensor, self._release, address)
        self.peak = max(self.peak, sum(self._sizes.values()))

    def _release(self, address: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self._sizes.pop(address, None)
