"""What is measured: lists of tensor shapes, and a network to train."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Workload:
    """Parameters of one dtype whose gradients are normal with standard deviation 1e-3."""

    name: str
    shapes: Shapes
    dtype: torch.dtype = torch.bfloat16

    @property
    def elements(self) -> int:
        """How many parameters there are."""
        return sum(prod(shape) for shape in self.shapes)

    def parameters(self, device: torch.device) -> list[nn.Parameter]:
        """New parameters with gradients, the same on every call."""
        draw = torch.Generator(device).manual_seed(0)
        made = []
        for shape in self.shapes:
            parameter = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=device).normal_(generator=draw))
            parameter.grad = torch.empty_like(parameter).normal_(std=1e-3, generator=draw)
            made.append(parameter)
        return made


def transformer_shapes(width: int, layers: int, vocabulary: int) -> Shapes:
    """A tied embedding, and for each layer four matrices with their biases and four vectors of two norms."""
    layer: list[tuple[int, ...]] = []
    for rows, cols in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
        layer += [(rows, cols), (rows,)]
    layer += [(width,)] * 4
    return ((vocabulary, width), *layer * layers)


def workload_a() -> Workload:
    """1.31 billion bfloat16 parameters in 289 tensors, in the shapes of a GPT."""
    return Workload("A", transformer_shapes(2048, 24, 50304))


SIZES = {
    "10M": (256, 8, 16384),
    "100M": (768, 12, 16384),
    "350M": (1024, 24, 50304),
    "1.3B": (2048, 24, 50304),
    "3B": (2560, 36, 50304),
    "7B": (4096, 33, 50304),
}


def sized(name: str) -> Workload:
    """A transformer of about that many parameters; raises ValueError for a size that is not in `SIZES`."""
    if name not in SIZES:
        raise ValueError(f"there is no size {name!r}; there are {', '.join(SIZES)}")
    return Workload(name, transformer_shapes(*SIZES[name]))


def divided(tensors: int, elements: int = 2**27) -> Workload:
    """The same number of elements in more or fewer square tensors."""
    side = int((elements / tensors) ** 0.5)
    return Workload(f"{tensors} tensors", ((side, side),) * tensors)


def tiny() -> Workload:
    """A few thousand float32 parameters, to see that everything runs."""
    return Workload("tiny", ((64, 32), (64,), (32, 64)), torch.float32)


# --- workload B -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of the network that workload B trains, and its batch."""

    width: int = 2048
    layers: int = 24
    vocabulary: int = 50304
    heads: int = 16
    batch: int = 4
    length: int = 1024


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return result


class Network(nn.Module):
    """A language model with a tied head; it has the tensors of workload A, and a last norm."""

    def __init__(self, shape: NetworkShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.device(device):
            self.embedding = nn.Embedding(shape.vocabulary, shape.width, dtype=dtype)
            self.layers = nn.ModuleList(Layer(shape.width, shape.heads) for _ in range(shape.layers)).to(dtype)
            self.norm = nn.LayerNorm(shape.width, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy of each next token, from (batch, length + 1) token numbers."""
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
