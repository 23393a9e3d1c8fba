"""Which parameters are hidden matrices."""

from __future__ import annotations

import gefen
import pytest
import torch
from torch import nn

from gefen_offload import split_params_for_muon
from gefen_offload.optim.split import check_split


class _Table(nn.Embedding):
    """An embedding by another name."""


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = _Table(11, 8)
        self.bag = nn.EmbeddingBag(5, 4)
        self.Token_Embed_proj = nn.Linear(8, 8)
        self.body = nn.Linear(8, 8)
        self.conv = nn.Conv2d(2, 2, 3)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.SCORE = nn.Linear(8, 2)
        self.tied = nn.Linear(8, 11, bias=False)
        self.tied.weight = self.shared.weight
        self.first = nn.Linear(8, 8, bias=False)
        self.lm_head = nn.Linear(8, 8, bias=False)
        self.lm_head.weight = self.first.weight


def test_only_hidden_matrices_go_to_muon() -> None:
    """Embeddings by type, tied heads by identity, heads by any of their names in any case, and vectors stay back."""
    muon, backup = split_params_for_muon(_Model())
    assert [name for name, _ in muon] == ["body.weight"]
    assert [name for name, _ in backup] == [
        "shared.weight",
        "bag.weight",
        "Token_Embed_proj.weight",
        "Token_Embed_proj.bias",
        "body.bias",
        "conv.weight",
        "conv.bias",
        "norm.weight",
        "norm.bias",
        "SCORE.weight",
        "SCORE.bias",
        "first.weight",
    ]


def test_the_fragments_are_the_callers() -> None:
    """Other fragments replace the usual ones; embeddings stay back all the same."""
    muon, _ = split_params_for_muon(_Model(), ("BODY",))
    assert [name for name, _ in muon] == ["Token_Embed_proj.weight", "SCORE.weight", "first.weight"]


def test_the_split_is_the_published_one() -> None:
    """Without a head tied to a hidden matrix, both lists are the published optimizer's."""
    model = _Model()
    model.lm_head = nn.Linear(8, 3)
    for ours, theirs in zip(split_params_for_muon(model), gefen.split_params_for_muon(model), strict=True):
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        assert all(a is b for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_every_wrong_split_is_named() -> None:
    """In both lists, in neither, twice in one, one name for two, and no pairs: each is an error that says which."""
    model = nn.Linear(4, 4)
    weight, bias = ("weight", model.weight), ("bias", model.bias)
    check_split(model, [weight], [bias])
    cases = [
        ([weight], [weight, bias], "weight is in the Muon list and in the backup list"),
        ([weight], [], "bias is trainable and in neither list"),
        ([weight, ("other", model.weight)], [bias], "Muon list holds one parameter twice, as 'weight' and 'other'"),
        ([weight], [bias, bias], "backup list holds one parameter twice, as 'bias' and 'bias'"),
        ([weight], [("weight", model.bias)], "the name 'weight' stands for more than one parameter"),
    ]
    for muon, backup, words in cases:
        with pytest.raises(ValueError, match=words):
            check_split(model, muon, backup)
    with pytest.raises(TypeError, match=r"backup list must hold \(name, parameter\) pairs, not a Parameter"):
        check_split(model, [weight], [model.bias])  # type: ignore[list-item]


def test_frozen_parameters_may_be_left_out() -> None:
    """A parameter that is not trainable is in neither list, and that is no error."""
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    muon, backup = split_params_for_muon(model)
    assert (len(muon), backup) == (1, [])
    check_split(model, muon, backup)
    assert torch.is_tensor(muon[0][1])
