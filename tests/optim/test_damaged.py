"""Damaged checkpoints: each is refused, the error names what is wrong, and the optimizer is bitwise as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gefen_offload import Gefen, GefenMuon, GefenMuonHybrid
from support.steps import differing, named, parameters, set_gradients, snapshot

SHAPES = ((16, 12), (24,), ())
METADATA = "_gefen_checkpoint_metadata"


def trained(steps=3):
    """An optimizer of a matrix (p0), a vector (p1) and a scalar (p2), that has taken some steps."""
    tensors = parameters(shapes=SHAPES)
    optimizer = Gefen(named(tensors), lr=0.1)
    for step in range(steps):
        set_gradients(tensors, step)
        optimizer.step()
    return tensors, optimizer


def entry(name, change, parameter=0):
    """Damage one entry of one parameter; `change` maps the entry's value, or is None to remove it."""

    def damage(saved):
        state = saved["state"][parameter]
        if change is None:
            del state[name]
        else:
            state[name] = change(state.get(name))

    return damage


def at(path, change):
    """Damage the entry at a path; `change` maps its value, or is None to remove it."""

    def damage(saved):
        *way, last = path
        for step in way:
            saved = saved[step]
        if change is None:
            del saved[last]
        else:
            saved[last] = change(saved.get(last) if isinstance(saved, dict) else saved[last])

    return damage


def written(position, value):
    """A change that sets one element."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[position] = value
        return tensor

    return change


def header(key, change):
    """Damage an entry of the header at both of its places."""

    def damage(saved):
        for place, name in ((saved, f"gefen_{key}"), (saved["param_groups"][0][METADATA], key)):
            place[name] = change(place[name])

    return damage


DAMAGE = {
    "state-that-is-none": (at(["state"], lambda _: None), "'state' of the checkpoint cannot be a NoneType"),
    "groups-that-are-a-word": (at(["param_groups"], lambda _: "x"), "'param_groups' .*cannot be a str"),
    "group-that-is-none": (at(["param_groups", 0], lambda _: None), "group 0 .*dict, not a NoneType"),
    "params-that-are-a-number": (at(["param_groups", 0, "params"], lambda _: 3), "'params' of group 0 .*list"),
    "param-that-is-a-list": (at(["param_groups", 0, "params"], lambda _: [0, [1], 2]), "'params' of group 0 .*list"),
    "name-that-is-none": (at(["param_groups", 0, "param_names", 1], lambda _: None), "'param_names' of group 0"),
    "made-up-by-a-tensor": (
        at(["param_groups", 0, "param_names_synthesized", 0], lambda _: torch.zeros(3)),
        "'param_names_synthesized' of group 0",
    ),
    "meta-row": (entry("v_row", lambda t: t.to("meta")), "p0: v_row is on the meta device"),
    "meta-step": (entry("step", lambda _: torch.empty((), device="meta")), "p0: step must be a count"),
    "no-state": (at(["state"], None), "no 'state'"),
    "no-groups": (at(["param_groups"], None), "no 'param_groups'"),
    "missing-parameter": (at(["state", 1], None), "no state of p1"),
    "extra-parameter": (at(["state", 9], lambda _: {}), "9"),
    "missing-indices": (entry("m_codebook", None), "p0.*m_codebook"),
    "missing-magnitudes": (entry("m_magnitude", None, 1), "p1.*m_magnitude"),
    "missing-period": (entry("automatic_period", None), "p0.*automatic_period"),
    "missing-step": (entry("step", None), "p0.*step"),
    "missing-second-moment": (entry("vmean_step", None, 1), "p1.*second moment"),
    "missing-vmean": (entry("vmean", None, 1), "p1.*vmean"),
    "missing-row": (entry("v_row", None), "p0.*v_row"),
    "missing-column": (entry("v_col", None), "p0.*v_col"),
    "extra-entry": (entry("exp_avg", lambda _: torch.zeros(3)), "p0.*exp_avg"),
    "factored-vector": (entry("factored_step", lambda _: 1, 1), "p1.*not a matrix"),
    "truncated-indices": (entry("m_codebook", lambda t: t[:, :-1]), r"p0: m_codebook .*\(1, 192\).*\(1, 191\)"),
    "truncated-magnitudes": (entry("m_magnitude", lambda t: t[:0]), r"p0: m_magnitude .*\(0, 1\)"),
    "reshaped-row": (entry("v_row", lambda t: t.view(4, 4)), r"p0: v_row .*\(4, 4\)"),
    "swapped-row": (entry("v_row", lambda t: t[:12]), r"p0: v_row .*\(12,\)"),
    "wide-indices": (entry("m_codebook", lambda t: t.long()), "p0: m_codebook .*int64"),
    "narrow-magnitudes": (entry("m_magnitude", lambda t: t.bfloat16()), "p0: m_magnitude .*bfloat16"),
    "double-vmean": (entry("vmean", lambda t: t.double(), 1), "p1: vmean .*float64"),
    "list-for-tensor": (entry("v_col", lambda t: t.tolist()), "p0: v_col must be a tensor, not a list"),
    "sparse-indices": (entry("m_codebook", lambda t: t.to_sparse()), "p0: m_codebook"),
    "nan-magnitude": (entry("m_magnitude", written(0, torch.nan)), "p0: m_magnitude .*NaN"),
    "infinite-vmean": (entry("vmean", written(0, torch.inf), 1), "p1: vmean .*infinity"),
    "nan-row": (entry("v_row", written(3, torch.nan)), "p0: v_row"),
    "negative-magnitude": (entry("m_magnitude", written(0, -1.0)), "p0: m_magnitude holds -1"),
    "negative-column": (entry("v_col", written(2, -0.5)), "p0: v_col holds -0.5"),
    "negative-step": (entry("step", lambda _: -1), "p0: step .*-1"),
    "fractional-step": (entry("step", lambda _: 2.5), "p0: step .*2.5"),
    "boolean-step": (entry("step", lambda _: True), "p0: step .*True"),
    "word-step": (entry("step", lambda _: "3"), "p0: step .*'3'"),
    "nan-step": (entry("step", lambda _: float("nan")), "p0: step .*nan"),
    "negative-age": (entry("vmean_step", lambda _: -2, 1), "p1: vmean_step .*-2"),
    "age-beyond-step": (entry("factored_step", lambda _: 4), "p0: factored_step is 4, older than its step, 3"),
    "zero-period": (entry("automatic_period", lambda _: 0), "p0: automatic_period is 0"),
    "period-that-does-not-divide": (entry("automatic_period", lambda _: 7), "p0: automatic_period is 7"),
    "another-period": (entry("automatic_period", lambda _: 96), r"p0: m_codebook .*\(2, 96\)"),
    "state-that-is-a-list": (at(["state", 0], lambda _: [1]), "p0 must be a dict, not a list"),
    "no-codebook": (header("codebook", lambda _: None), "no codebook"),
    "short-codebook": (header("codebook", lambda t: t[:-1]), r"codebook .*\(255,\)"),
    "double-codebook": (header("codebook", lambda t: t.double()), "codebook .*float64"),
    "nan-codebook": (header("codebook", written(100, torch.nan)), "codebook .*NaN"),
    "unsorted-codebook": (header("codebook", written(100, 0.999)), "codebook must ascend"),
    "codebook-out-of-range": (header("codebook", written(255, 1.5)), "codebook must ascend from -1 to 1"),
    "negative-global-step": (header("global_step", lambda _: -5), "global_step .*-5"),
    "no-header": (
        lambda saved: (
            [saved.pop(key) for key in ("gefen_global_step", "gefen_codebook")]
            and saved["param_groups"][0].pop(METADATA)
        ),
        "neither",
    ),
    "half-a-header": (at(["gefen_codebook"], None), "no 'gefen_codebook'"),
    "partial-metadata": (at(["param_groups", 0, METADATA, "codebook"], None), "exactly"),
    "unknown-metadata": (at(["param_groups", 0, METADATA, "more"], lambda _: 1), "exactly"),
    "metadata-of-another-format": (
        at(["param_groups", 0, METADATA, "format_version"], lambda _: 2),
        "format_version 2",
    ),
    "metadata-of-a-tensor-format": (
        at(["param_groups", 0, METADATA, "format_version"], lambda _: torch.zeros(3)),
        "format_version must be a count",
    ),
    "metadata-that-differs": (at(["param_groups", 0, METADATA, "global_step"], lambda _: 9), "differs"),
    "one-group-more": (lambda saved: saved["param_groups"].append({"params": []}), "2 parameter groups, .*1"),
    "one-parameter-less": (at(["param_groups", 0, "params"], lambda p: p[:-1]), "group 0 .*2 parameters, .*3"),
    "parameter-listed-twice": (at(["param_groups", 0, "params"], lambda _: [0, 1, 1]), "twice"),
    "short-names": (at(["param_groups", 0, "param_names"], lambda names: names[:-1]), "2 param_names for 3"),
    "other-names": (at(["param_groups", 0, "param_names"], lambda _: ["a", "p1", "p2"]), "'a' .*'p0'"),
    "names-in-another-order": (at(["param_groups", 0, "param_names"], lambda n: [n[0], n[2], n[1]]), "'p2' .*'p1'"),
    "no-lr": (at(["param_groups", 0, "lr"], None), "group 0 .*no 'lr'"),
    "negative-lr": (at(["param_groups", 0, "lr"], lambda _: -0.1), "group 0 .*lr .*-0.1"),
    "nan-beta": (at(["param_groups", 0, "beta1"], lambda _: float("nan")), "group 0 .*beta1 .*nan"),
    "no-beta": (at(["param_groups", 0, "beta2"], None), "group 0 .*no 'beta2'"),
    "word-decay": (at(["param_groups", 0, "weight_decay"], lambda _: "0.1"), "group 0 .*weight_decay .*'0.1'"),
}


def live_objects(optimizer):
    """Every container and value of an optimizer's state and groups."""
    states = [value for state in optimizer.state.values() for value in (state, *state.values())]
    return [optimizer.state, optimizer.param_groups, *optimizer.param_groups, *states]


@pytest.mark.parametrize("name", list(DAMAGE))
@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "trained"])
def test_damage_is_refused(name, steps):
    """A damaged checkpoint raises a ValueError naming the entry; state, groups and their identities stay."""
    damage, message = DAMAGE[name]
    saved = snapshot(trained()[1].state_dict())
    damage(saved)
    tensors, optimizer = trained(steps)
    before = snapshot(optimizer.state_dict())
    held = live_objects(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert differing(before, optimizer.state_dict()) is None
    assert all(a is b for a, b in zip(held, live_objects(optimizer), strict=True))
    set_gradients(tensors, 5)
    optimizer.step()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(16, 12), (24,)], "3 parameters, .*2"),
        ([(16, 13), (24,), ()], "p0: automatic_period is 192"),
        ([(16, 24), (24,), ()], r"p0: m_codebook .*\(2, 192\)"),
        ([(12, 16), (24,), ()], r"p0: v_row .*\(12,\)"),
    ],
    ids=["fewer", "another-width", "twice-as-wide", "transposed"],
)
def test_another_models_checkpoint(shapes, message):
    """A checkpoint of a model with other shapes is refused, naming the parameter."""
    saved = trained()[1].state_dict()
    optimizer = Gefen(named(parameters(shapes=shapes)))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("thing", [None, [], torch.zeros(3)], ids=["none", "list", "tensor"])
def test_what_is_no_checkpoint(thing):
    """Something else than a dict is refused, naming its type."""
    with pytest.raises(ValueError, match=f"a {type(thing).__name__} is not a Gefen state_dict"):
        trained()[1].load_state_dict(thing)


@pytest.mark.parametrize("thing", [None, []], ids=["none", "list"])
def test_what_is_no_muon_checkpoint(thing):
    """GefenMuon and the hybrid refuse it in the same words."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for optimizer in (GefenMuon([model[0].weight]), GefenMuonHybrid(model, lr=0.1)):
        name = f"{type(thing).__name__} is not a {type(optimizer).__name__} state_dict"
        with pytest.raises(ValueError, match=name):
            optimizer.load_state_dict(thing)


def test_a_checkpoint_of_adamw():
    """A checkpoint of torch's AdamW is refused."""
    tensors, optimizer = trained()
    adamw = torch.optim.AdamW(tensors)
    adamw.step()
    with pytest.raises(ValueError, match="neither 'gefen_global_step' nor"):
        optimizer.load_state_dict(adamw.state_dict())


def test_running_out_of_memory_while_loading_changes_nothing(monkeypatch):
    """If the copies of a sound checkpoint cannot be made, the optimizer is bitwise as it was."""
    saved = snapshot(trained(steps=2)[1].state_dict())
    _, optimizer = trained()
    before = snapshot(optimizer.state_dict())

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(optimizer, "_place_state", fail)
    with pytest.raises(MemoryError):
        optimizer.load_state_dict(saved)
    assert differing(before, optimizer.state_dict()) is None
