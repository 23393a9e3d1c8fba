"""Host memory: tight tensors of their own, registered without rounding, freed when the last of them is gone."""

from __future__ import annotations

import gc

import torch

from gefen_offload.offload.slab import ALIGNMENT, PAGE, HostMemory, HostStore

REQUESTS = [
    {"a": ((7, 5), torch.uint8), "b": ((7, 1), torch.float32)},
    {"a": ((3,), torch.float64), "none": ((0, 4), torch.float32), "scalar": ((), torch.bfloat16)},
]


def test_tensors_are_tight_and_their_own():
    """Each starts at an aligned address, fills a storage of its own, and is zero."""
    store = HostStore(HostMemory)
    tensors = [t for request in store.zeros(REQUESTS) for t in request.values()]
    assert [t.dtype for t in tensors] == [d for request in REQUESTS for _, d in request.values()]
    assert [tuple(t.shape) for t in tensors] == [s for request in REQUESTS for s, _ in request.values()]
    for tensor in tensors:
        assert not tensor.any()
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.data_ptr() % ALIGNMENT == 0
    addresses = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    assert len(set(addresses)) == len(addresses)


def test_a_store_finds_its_tensors():
    """By address: views, other tensors and tensors of another store are not found."""
    store, other = HostStore(HostMemory), HostStore(HostMemory)
    (request, _), (foreign, _) = store.zeros(REQUESTS), other.zeros(REQUESTS)
    place = store.find(request["b"])
    assert place is not None
    assert place.nbytes == 28
    assert torch.equal(place.slab.bytes(place.offset, place.offset + 28), request["b"].view(-1).view(torch.uint8))
    for tensor in (request["a"][1:], foreign["a"], torch.zeros(3), request["a"].t()):
        assert store.find(tensor) is None


def test_memory_lives_as_long_as_a_tensor():
    """The release action runs once, after the last tensor and not before."""
    released = []

    def allocate(nbytes):
        memory = HostMemory(nbytes)
        memory.on_release(lambda: released.append(nbytes))
        return memory

    store = HostStore(allocate)
    tensors = store.zeros(REQUESTS)
    last = tensors[1]["scalar"]
    assert len(store.slabs) == 1
    del tensors
    gc.collect()
    assert released == []
    last += 1
    assert store.find(last) is not None
    del last
    gc.collect()
    assert len(released) == 1
    assert store.slabs == []


def test_little_is_reserved_beyond_the_state():
    """Memory is rounded up to a page only."""
    store = HostStore(HostMemory)
    kept = store.zeros([{"m": ((2**20 + 1,), torch.uint8)}])
    (slab,) = store.slabs
    assert slab.asked == 2**20 + 1
    assert slab.nbytes - slab.asked < PAGE
    assert slab.address % PAGE == 0
    assert kept
