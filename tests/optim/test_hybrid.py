"""GefenMuonHybrid: two optimizers with one face, which load together or not at all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import gefen
import pytest
import torch
from torch import nn

from gefen_offload import Gefen, GefenMuon, GefenMuonHybrid, OffloadReason, OffloadUnsupportedError
from support.steps import differing, snapshot

BACKENDS = ("gefen", "adamw")


class _Model(nn.Module):
    """An embedding tied to the output, two matrices and their vectors."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8, sparse=sparse)
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.relu(self.up(self.table(tokens))))
        return nn.functional.linear(self.norm(hidden), self.table.weight.detach())


def _model(**options: Any) -> _Model:
    torch.manual_seed(0)
    return _Model(**options)


def _train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def _trained(backend: str = "gefen", steps: int = 3, **options: Any) -> tuple[_Model, GefenMuonHybrid]:
    model = _model()
    optimizer = GefenMuonHybrid(model, 1e-2, backend, **options)
    _train(model, optimizer, 0, steps)
    return model, optimizer


def _published(backend: str = "gefen", steps: int = 3, **options: Any) -> tuple[_Model, Any]:
    model = _model()
    chosen = {"normuon": False, "ns_schedule": None, **options}
    optimizer = gefen.GefenMuonHybrid.from_model(model, lr=1e-2, fused=False, backup_optimizer=backend, **chosen)
    _train(model, optimizer, 0, steps)
    return model, optimizer


def _identities(optimizer: GefenMuonHybrid) -> list[Any]:
    """What must still be the very same objects after a refused load."""
    objects: list[Any] = []
    for child in optimizer.children:
        objects += [child.state, child.param_groups, *child.param_groups, *child.state.values()]
        objects += [value for entry in child.state.values() for value in entry.values() if torch.is_tensor(value)]
    return objects


def _check_refused(
    optimizer: GefenMuonHybrid, checkpoint: Any, words: str, error: type[Exception] = ValueError
) -> None:
    before, objects = snapshot(optimizer.state_dict()), _identities(optimizer)
    with pytest.raises(error, match=words):
        optimizer.load_state_dict(checkpoint)
    assert differing(optimizer.state_dict(), before) is None
    assert all(a is b for a, b in zip(objects, _identities(optimizer), strict=True))


# --- construction and steps ---


def test_each_parameter_goes_to_one_child() -> None:
    """Matrices are Muon's; the embedding and the vectors are the backup's."""
    _, optimizer = _trained(steps=0)
    assert isinstance(optimizer.muon, GefenMuon)
    assert isinstance(optimizer.backup, Gefen)
    assert optimizer.muon.param_groups[0]["param_names"] == ["up.weight", "down.weight"]
    assert optimizer.backup.param_groups[0]["param_names"] == [
        "table.weight",
        "up.bias",
        "down.bias",
        "norm.weight",
        "norm.bias",
    ]


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_is_the_published_training(backend: str) -> None:
    """Without NorMuon and tuned schedules, eight training steps of a small network give the published bits."""
    theirs, _ = _published(backend, 8)
    ours, _ = _trained(backend, 8)
    assert differing(list(theirs.parameters()), list(ours.parameters())) is None


def test_options_reach_the_side_they_belong_to() -> None:
    """A side's own lr and weight decay win over the shared ones."""
    _, optimizer = _trained(
        "adamw",
        0,
        muon_lr=0.5,
        backup_lr=0.25,
        weight_decay=0.125,
        muon_weight_decay=0.0,
        betas=(0.5, 0.75),
        momentum=0.5,
    )
    muon, backup = optimizer.param_groups
    assert (muon["lr"], muon["weight_decay"], muon["momentum"], muon["adjust_lr_fn"]) == (
        0.5,
        0,
        0.5,
        "match_rms_adamw",
    )
    assert (backup["lr"], backup["weight_decay"], backup["betas"]) == (0.25, 0.125, (0.5, 0.75))


def test_a_side_without_parameters_is_none() -> None:
    """A model of matrices only, and one of vectors only, have one child, and None for the other in a checkpoint."""
    for model, empty, full in ((nn.Linear(4, 4, bias=False), "backup", "muon"), (nn.LayerNorm(4), "muon", "backup")):
        optimizer = GefenMuonHybrid(model, 1e-2)
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        saved = snapshot(optimizer.state_dict())
        assert saved[empty] is None
        assert saved[full] is not None
        optimizer.load_state_dict(saved)
        assert differing(optimizer.state_dict(), saved) is None


def test_a_wrong_split_or_backend_is_refused_at_construction() -> None:
    """Lists that miss, share or misname a parameter, one list alone, no parameter, and an unknown backup are errors."""
    model = nn.Linear(4, 4)
    weight, bias = ("weight", model.weight), ("bias", model.bias)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"muon_params": [weight], "backup_params": []}, "bias is trainable and in neither list"),
        ({"muon_params": [weight], "backup_params": [weight, bias]}, "would step twice"),
        ({"muon_params": [weight], "backup_params": [("weight", model.bias)]}, "more than one parameter"),
        ({"muon_params": [weight]}, "muon_params was given without backup_params"),
        ({"backup_params": [bias]}, "backup_params was given without muon_params"),
        ({"muon_params": [bias], "backup_params": [weight]}, "2-D"),
        ({"backup_optimizer": "sgd"}, "backup_optimizer must be 'gefen' or 'adamw', not 'sgd'"),
    ]
    for options, words in cases:
        with pytest.raises(ValueError, match=words):
            GefenMuonHybrid(model, 1e-2, **options)
    with pytest.raises(ValueError, match="no trainable parameter"):
        GefenMuonHybrid(model.requires_grad_(False), 1e-2)
    with pytest.raises(TypeError, match=r"must be the model, an nn\.Module, not a list"):
        GefenMuonHybrid([weight], 1e-2)  # type: ignore[arg-type]
    model.requires_grad_(True)
    given = GefenMuonHybrid(model, 1e-2, muon_params=iter([weight]), backup_params=iter([bias]))
    assert len(given.children) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sparse_gradient_is_refused_before_either_steps(backend: str) -> None:
    """The backup's sparse gradient raises, naming it, and Muon's matrices have not moved."""
    model = _model(sparse=True)
    optimizer = GefenMuonHybrid(model, 1e-2, backend)
    before = snapshot(list(model.parameters()))
    with pytest.raises(RuntimeError, match=r"table.weight has a sparse or complex gradient"):
        _train(model, optimizer, 0, 1)
    assert differing(snapshot(list(model.parameters())), before) is None


def test_it_is_one_optimizer_to_the_outside() -> None:
    """A scheduler changes the lr of both sides, a closure runs once, and hooks on the whole run once a step."""
    model, optimizer = _trained(steps=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        loss = model(torch.arange(6)[None]).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    scheduler.step()
    assert calls == ["pre", "closure", "post"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
    assert len(optimizer.state) == 7
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"hybrid.muon or hybrid.backup"):
        optimizer.add_param_group({"params": []})


def test_a_gradient_scaler_steps_it_or_skips_it_whole() -> None:
    """On an overflow neither side steps; the next step goes on."""
    model, optimizer = _trained(steps=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = snapshot(list(model.parameters()))
    for overflow in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.arange(6)[None]).square().mean()).backward()
        if overflow:
            model.norm.bias.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert (differing(snapshot(list(model.parameters())), before) is None) is overflow


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_continues_as_the_original(way: str, backend: str) -> None:
    """A deep copy and a pickle of model and optimizer together take the same next steps."""
    model, optimizer = _trained(backend)
    both = (model, optimizer)
    other_model, other = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    _train(model, optimizer, 3, 6)
    _train(other_model, other, 3, 6)
    assert differing(list(model.parameters()), list(other_model.parameters())) is None


# --- checkpoints ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["ours", "published"])
def test_a_checkpoint_continues(source: str, backend: str) -> None:
    """Ours, and the published hybrid's, load into a fresh hybrid whose next ten steps are those of the source."""
    model, optimizer = (_trained if source == "ours" else _published)(backend, 4)
    saved = snapshot(optimizer.state_dict())
    assert set(saved) == {"muon", "backup", "backup_optimizer"}
    continued = copy.deepcopy(model)
    fresh = GefenMuonHybrid(continued, 1e-2, backend)
    kept = copy.deepcopy(saved)
    fresh.load_state_dict(saved)
    _train(model, optimizer, 4, 14)
    _train(continued, fresh, 4, 14)
    assert differing(list(model.parameters()), list(continued.parameters())) is None
    assert differing(saved, snapshot(kept)) is None


def test_our_checkpoint_continues_in_the_published_hybrid() -> None:
    """The published hybrid loads ours, and its next ten steps are ours."""
    model, optimizer = _trained("gefen", 4)
    other_model, other = _published("gefen", 0)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(model, optimizer, 4, 14)
    _train(other_model, other, 4, 14)
    assert differing(list(model.parameters()), list(other_model.parameters())) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_checkpoint_of_the_other_backup_is_refused(backend: str) -> None:
    """The error names both backups, and neither side changes."""
    other = BACKENDS[1 - BACKENDS.index(backend)]
    _, optimizer = _trained(backend)
    _, saved = _trained(other)
    words = f"backup_optimizer is '{other}', this optimizer's '{backend}'"
    _check_refused(optimizer, saved.state_dict(), words)


@pytest.mark.parametrize("option", ["normuon", "ns_schedule", "cautious"])
def test_a_checkpoint_with_an_option_that_is_lacking_is_refused(option: str) -> None:
    """The published hybrid's NorMuon, tuned schedule and caution are refused by name, and neither side changes."""
    chosen = {"ns_schedule": "tuned3"} if option == "ns_schedule" else {option: True}
    _, published = _published(**chosen)
    _, optimizer = _trained()
    _check_refused(optimizer, published.state_dict(), option)


def test_a_checkpoint_of_another_layout_is_refused() -> None:
    """A flat one, one that lacks a part, one with a part too many, and a split of another kind are told apart."""
    _, optimizer = _trained()
    good = snapshot(optimizer.state_dict())
    _check_refused(optimizer, good["backup"], "flat checkpoint")
    for key in good:
        _check_refused(optimizer, {name: part for name, part in good.items() if name != key}, f"no '{key}'")
    _check_refused(optimizer, {**good, "extra": 1}, "unknown entry 'extra'")
    _check_refused(optimizer, {**good, "muon": None}, "this optimizer has a 'muon' part and the checkpoint has none")
    matrices = GefenMuonHybrid(nn.Linear(4, 4, bias=False), 1e-2)
    _check_refused(matrices, good, "the checkpoint has a 'backup' part and this optimizer has none")


def _break(part: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    def broken(good: Any) -> Any:
        change(good[part])
        return good

    return broken


DAMAGE: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "muon-entry": ("gefen", _break("muon", lambda p: p["state"][1].pop("m_magnitude")), "m_magnitude"),
    "muon-groups": ("gefen", _break("muon", lambda p: p["param_groups"].clear()), "0 parameter groups"),
    "gefen-entry": ("gefen", _break("backup", lambda p: p["state"][2].pop("vmean")), "vmean"),
    "gefen-value": ("gefen", _break("backup", lambda p: p["state"][2]["vmean"].fill_(float("nan"))), "NaN"),
    "gefen-codebook": ("gefen", _break("backup", lambda p: p.update(gefen_codebook=None)), "gefen"),
    "adamw-state": ("adamw", _break("backup", lambda p: p.pop("state")), "no 'state'"),
    "adamw-groups": ("adamw", _break("backup", lambda p: p["param_groups"].append({})), "2 parameter groups"),
    "adamw-count": ("adamw", _break("backup", lambda p: p["param_groups"][0]["params"].pop()), "4 parameters"),
    "adamw-option": ("adamw", _break("backup", lambda p: p["param_groups"][0].pop("betas")), "no 'betas'"),
    "adamw-names": ("adamw", _break("backup", lambda p: p["param_groups"][0]["param_names"].reverse()), "'norm.bias'"),
    "adamw-step": ("adamw", _break("backup", lambda p: p["state"][1].pop("step")), "up.bias has no 'step'"),
    "adamw-shape": ("adamw", _break("backup", lambda p: p["state"][1]["exp_avg"].resize_(3)), r"\(16,\), not \(3,\)"),
    "adamw-value": ("adamw", _break("backup", lambda p: p["state"][1]["exp_avg_sq"].fill_(float("inf"))), "infinity"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_part_leaves_both_sides_as_they_were(damage: str) -> None:
    """Whichever part is damaged, the error names the entry, and neither side changes even for a moment."""
    backend, change, words = DAMAGE[damage]
    _, optimizer = _trained(backend)
    _, source = _trained(backend, 5)
    loaded: list[Any] = []
    for child in optimizer.children:
        child.register_load_state_dict_post_hook(loaded.append)
    _check_refused(optimizer, change(copy.deepcopy(source.state_dict())), words)
    assert not loaded


def test_running_out_of_memory_in_the_second_part_undoes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the backup fail after all checks, Muon holds the very objects it held before."""
    _, optimizer = _trained()
    _, source = _trained(steps=5)
    assert optimizer.backup is not None

    def fail(*_: Any) -> None:
        raise MemoryError("no room for the copies")

    monkeypatch.setattr(optimizer.backup, "_place_state", fail)
    _check_refused(optimizer, source.state_dict(), "no room", MemoryError)


# --- where the state lives ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_offload_is_refused_and_moving_is_not(backend: str) -> None:
    """`offload_state_()` raises with the `optimizer` reason; `move_state_()` keeps every bit, and refuses elsewhere."""
    _, optimizer = _trained(backend)
    before = snapshot(optimizer.state_dict())
    with pytest.raises(OffloadUnsupportedError, match="whole matrices") as caught:
        optimizer.offload_state_()
    assert caught.value.reason is OffloadReason.OPTIMIZER
    optimizer.restore_state_()
    optimizer.move_state_()
    optimizer.move_state_("cpu")
    with pytest.raises(ValueError, match="parameters are on"):
        optimizer.move_state_("meta")
    assert not optimizer.state_offload_active
    assert differing(optimizer.state_dict(), before) is None


def test_adamw_alone_moves_only_where_its_parameters_are() -> None:
    """Without a Muon side, another device is refused all the same."""
    model = nn.LayerNorm(4)
    optimizer = GefenMuonHybrid(model, 1e-2, "adamw")
    with pytest.raises(ValueError, match=r"move_state_\('meta'\): parameters are on \['cpu'\]"):
        optimizer.move_state_("meta")
    optimizer.move_state_("cpu")
