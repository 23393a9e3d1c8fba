"""A small GPT on bytes, made of operations whose CUDA backward is deterministic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.corpus import VOCABULARY


@dataclass(frozen=True)
class GPTShape:
    """Sizes of the network, and the structural options that distributed runs stumble over."""

    width: int = 64
    layers: int = 2
    heads: int = 2
    length: int = 32
    tied: bool = False  # the output layer shares the embedding's weight
    tower: bool = False  # an extra branch that a step can leave out: its gradients are then None
    recompute: bool = False  # activation checkpointing of every layer


class Layer(nn.Module):
    """Pre-norm attention and MLP; the attention is written out because the fused one's backward uses atomics."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)
        self.fc1 = nn.Linear(shape.width, 4 * shape.width)
        self.fc2 = nn.Linear(4 * shape.width, shape.width)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Byte-level language model; `forward` returns the mean cross-entropy in nats per byte, a 0-d tensor."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Parameter(torch.randn(shape.length, shape.width) * 0.02)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.tower = nn.Linear(shape.width, shape.width) if shape.tower else None
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor, use_tower: bool = True) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.shape.recompute else layer(x)
        if self.tower is not None and use_tower:
            x = x + self.tower(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(shape: GPTShape, seed: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> GPT:
    """The network with weights drawn on the CPU from `seed`, so that every device starts from the same bits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(shape)
    return model.to(device=device, dtype=dtype)
