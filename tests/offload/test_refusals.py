"""What offload does not support is refused with a code and advice, at activation or at a later step."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gefen_offload import Gefen, GefenMuon, OffloadPolicy, OffloadReason, OffloadUnsupportedError
from gefen_offload.offload import refusals
from gefen_offload.offload.schema import Cut, StateSchema, TensorEntry
from gefen_offload.ranks import identical
from support.simulated import SimulatedAccelerator, simulated
from support.streamed import Row, Training
from support.witness import Witness

CPU = torch.device("cpu")
ROW = Row("refusals", small_pieces=False)


@pytest.fixture
def accelerator():
    """The simulated accelerator, in place for the whole test."""
    with simulated(SimulatedAccelerator()) as accelerator:
        yield accelerator


@pytest.fixture
def training(accelerator):
    """An optimizer that has stepped once, resident."""
    training = Training(ROW, CPU)
    training.step(0, False)
    return training


# --- ways to get into trouble: each returns how to get out of it ---


def alias_two_states(training, accelerator):
    first, second = (training.optimizer.state[training.named[name]] for name in ("wide", "tall"))
    second["v_row"] = first["v_row"]


def alias_a_parameter(training, accelerator):
    state = training.optimizer.state[training.named["wide"]]
    state["v_col"] = training.named["wide"].detach()[0]


def alias_the_codebook(training, accelerator):
    state = training.optimizer.state[training.named["wide.bias"]]
    state["vmean"] = training.optimizer._shared_tensors()["codebook"][:4].view(4, 1)


def add_a_tensor(training, accelerator):
    training.optimizer.state[training.named["norm"]]["ema"] = torch.zeros(3)


def add_an_object(training, accelerator):
    training.optimizer.state[training.named["norm"]]["hook"] = object()


def hide_a_tensor(training, accelerator):
    training.optimizer.state[training.named["norm"]]["history"] = [1, {"x": (torch.zeros(1),)}]


def change_a_dtype(training, accelerator):
    state = training.optimizer.state[training.named["norm"]]
    state["m_magnitude"] = state["m_magnitude"].double()


def state_of_no_parameter(training, accelerator):
    training.optimizer.state[nn.Parameter(torch.zeros(2))]["v"] = torch.zeros(2)


def drop_a_parameter(training, accelerator):
    training.optimizer.param_groups[0]["params"] = training.optimizer.param_groups[0]["params"][:-1]


def replace_a_parameter(training, accelerator):
    params = training.optimizer.param_groups[0]["params"]
    params[3] = nn.Parameter(params[3].detach().clone())


def clear_the_groups(training, accelerator):
    training.optimizer.param_groups.clear()


def move_a_parameter(training, accelerator):
    accelerator.unusable.add(id(training.named["tall"]))


def capture(training, accelerator):
    accelerator.capturing = True


def capturable_group(training, accelerator):
    training.optimizer.param_groups[0]["capturable"] = True


LATER = [
    (alias_two_states, "aliased"),
    (alias_a_parameter, "aliased"),
    (alias_the_codebook, "aliased"),
    (add_a_tensor, "custom-state"),
    (add_an_object, "custom-state"),
    (hide_a_tensor, "custom-state"),
    (change_a_dtype, "custom-state"),
    (drop_a_parameter, "ownership"),
    (replace_a_parameter, "ownership"),
    (clear_the_groups, "ownership"),
    (move_a_parameter, "cpu-parameter"),
    (capture, "capturable"),
    (capturable_group, "capturable"),
]
NOW = [*LATER, (state_of_no_parameter, "custom-state")]


def name_of(value):
    return value if isinstance(value, str) else value.__name__.replace("_", "-")


def refused(operation, code):
    """The operation raises this code with a sentence that says what to do; returns the message."""
    with pytest.raises(OffloadUnsupportedError) as caught:
        operation()
    assert caught.value.reason is OffloadReason(code), caught.value
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value).startswith(f"[{code}] ")
    assert len(str(caught.value)) > 80
    return str(caught.value)


@pytest.mark.parametrize(("trouble", "code"), NOW, ids=name_of)
def test_activation_refuses(accelerator, training, trouble, code):
    """Activation names the reason and changes nothing: bits, identities, memory."""
    trouble(training, accelerator)
    witness = Witness(training.optimizer, accelerator)
    refused(training.optimizer.offload_state_, code)
    witness.check()


@pytest.mark.parametrize(("trouble", "code"), LATER, ids=name_of)
def test_a_later_step_refuses(accelerator, training, trouble, code):
    """What arises while offload is on is refused by the next step, before any change."""
    training.optimizer.offload_state_()
    training.step(1, True)
    trouble(training, accelerator)
    witness = Witness(training.optimizer, accelerator)
    refused(training.optimizer.step, code)
    witness.check()
    assert not training.optimizer.state_offload_poisoned


def test_cpu_parameters_are_refused():
    """Without an accelerator, the real seam says that the parameters are on the CPU."""
    optimizer = Gefen([("weight", nn.Parameter(torch.randn(8, 8)))])
    message = refused(optimizer.offload_state_, "cpu-parameter")
    assert "weight is on cpu" in message
    assert not optimizer.state_offload_active


def test_mixed_devices_are_refused(training, accelerator, monkeypatch):
    """Two devices under one optimizer, named with a parameter each."""
    other = nn.Parameter(torch.empty(3, device="meta"))
    subject = replace(training.optimizer._subject(), groups=[{"params": [training.named["wide"], other]}])
    monkeypatch.setattr(accelerator, "is_compute", lambda tensor: True)
    message = refused(lambda: refusals.refuse_devices(subject, accelerator), "mixed-devices")
    assert "cpu" in message
    assert "meta" in message


class Tagged(nn.Parameter):
    """A subclass of Parameter."""


def test_a_parameter_subclass_is_refused(accelerator):
    """Subclasses may hold anything behind their bits."""
    optimizer = Gefen([("weight", Tagged(torch.randn(4, 4)))])
    assert "Tagged" in refused(optimizer.offload_state_, "subclass")


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_tensor_of_torchao_is_refused(accelerator):
    """Weights that torchao has quantised in place, beside an ordinary bias, are refused with nothing changed."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = nn.Linear(32, 16)
    quantize_(layer, Int8WeightOnlyConfig())
    optimizer = Gefen(layer.named_parameters())
    layer.bias.grad = torch.randn(16)
    optimizer.step()
    before = optimizer.state_dict()
    message = refused(optimizer.offload_state_, "subclass")
    assert f"weight is a {type(layer.weight).__module__}" in message
    assert "torch.nn.Parameter" in message
    identical(before, optimizer.state_dict()).check()


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda: torch.empty(2, 2, device="meta"), id="meta"),
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.zeros(2, dtype=torch.complex64), id="complex"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), id="nested"),
        pytest.param(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), id="quantised"),
        pytest.param(lambda: fake(), id="fake"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_peculiar_tensors_are_refused(training, tensor):
    """Whatever is not a plain dense real tensor with memory has the code `subclass`."""
    value = tensor()
    parameter = nn.Parameter(value, requires_grad=False) if type(value) is torch.Tensor else value
    subject = replace(training.optimizer._subject(), groups=[{"params": [parameter]}], owned=None)
    refused(lambda: refusals.refuse_structure(subject), "subclass")


def fake():
    """A fake tensor, as under torch.export."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        return mode.from_tensor(torch.zeros(2))


def test_capturable_is_refused(accelerator):
    """An optimizer made for CUDA graphs keeps its counters on the device."""
    optimizer = Gefen([("weight", nn.Parameter(torch.randn(4, 4)))], capturable=True)
    refused(optimizer.offload_state_, "capturable")


@pytest.mark.parametrize("active", [False, True], ids=["activation", "step"])
@pytest.mark.filterwarnings("ignore")
def test_compilation_is_refused(accelerator, active):
    """Inside torch.compile neither activation nor an offloaded step runs."""
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = Gefen([("weight", parameter)])
    parameter.grad = torch.randn(4, 4)
    optimizer.step()
    if active:
        optimizer.offload_state_()
    witness = Witness(optimizer, accelerator)
    operation = optimizer.step if active else optimizer.offload_state_
    refused(torch.compile(lambda: operation(), backend="eager"), "compiling")
    witness.check()
    operation()


class OwnStep(Gefen):
    """A subclass with another step and no schema."""

    def step(self, closure=None):
        return super().step(closure)


class OwnUpdate(Gefen):
    """A subclass with another update and no schema."""

    def _update(self, staged):
        super()._update(staged)


class Declared(Gefen):
    """A subclass with another update, and a schema for it."""

    STATE_SCHEMA = Gefen.STATE_SCHEMA

    def _update(self, staged):
        super()._update(staged)


class Innocent(Gefen):
    """A subclass that leaves the update alone."""

    def describe(self):
        return "innocent"


@pytest.mark.parametrize("kind", [OwnStep, OwnUpdate], ids=name_of)
def test_an_undeclared_update_is_refused(accelerator, kind):
    """A subclass that overrides the update must declare its state."""
    optimizer = kind([("weight", nn.Parameter(torch.randn(4, 4)))])
    assert "STATE_SCHEMA" in refused(optimizer.offload_state_, "optimizer")


@pytest.mark.parametrize("kind", [Declared, Innocent], ids=name_of)
def test_other_subclasses_are_accepted(accelerator, kind):
    """A declared update, or none, is supported; torch's own wrapper around step is not taken for an override."""
    optimizer = kind([("weight", nn.Parameter(torch.randn(4, 4)))])
    optimizer.offload_state_()
    assert optimizer.state_offload_active


def test_gefen_muon_is_refused(accelerator):
    """Muon steps whole matrices; its state can be moved but not streamed."""
    optimizer = GefenMuon([("weight", nn.Parameter(torch.randn(4, 4)))])
    refused(optimizer.offload_state_, "optimizer")
    optimizer.move_state_()


def test_structure_comes_before_the_device(training):
    """A flat parameter on the CPU is a flat parameter first."""
    training.named["wide"]._is_flat_param = True
    with simulated(SimulatedAccelerator()) as accelerator:
        accelerator.unusable.add(id(training.named["wide"]))
        refused(training.optimizer.offload_state_, "flat-parameter")


def test_an_added_group_is_refused_and_taken_back(accelerator, training):
    """A group with an unsupported parameter leaves the groups and the state as they were; a good one is accepted."""
    optimizer = training.optimizer
    optimizer.offload_state_()
    witness = Witness(optimizer, accelerator)
    bad = {"params": [("bad", Tagged(torch.randn(3, 3)))]}
    refused(lambda: optimizer.add_param_group(bad), "subclass")
    witness.check()
    optimizer.add_param_group({"params": [("good", nn.Parameter(torch.randn(3, 3)))]})
    training.step(1, True)


def test_an_added_group_of_the_same_length_is_taken_back(accelerator):
    """Groups are told apart by identity: one that looks like an earlier one is still the one taken back."""
    optimizer = Gefen([nn.Parameter(torch.randn(3, 3))])
    optimizer.offload_state_()
    witness = Witness(optimizer, accelerator)
    refused(lambda: optimizer.add_param_group({"params": [Tagged(torch.randn(3, 3))]}), "subclass")
    witness.check()


def test_another_device_or_policy_is_an_error(accelerator, training):
    """State goes to the CPU only; a second activation does nothing, or says that the policy is another."""
    optimizer = training.optimizer
    with pytest.raises(ValueError, match="'cpu' only"):
        optimizer.offload_state_("cuda")
    optimizer.offload_state_()
    before = optimizer._offload
    optimizer.offload_state_()
    assert optimizer._offload is before
    with pytest.raises(ValueError, match="restore_state_"):
        optimizer.offload_state_(policy=replace(before.policy, deferred=True))


@pytest.mark.parametrize("policy", [None, {"staging_bytes": 1}], ids=["none", "dict"])
def test_a_policy_of_another_type_is_an_error(accelerator, training, policy):
    """What is no OffloadPolicy is refused by name, by activation and by the plan."""
    for call in (training.optimizer.offload_state_, training.optimizer.state_offload_plan):
        with pytest.raises(TypeError, match="policy must be an OffloadPolicy, not"):
            call(policy=policy)
    assert not training.optimizer.state_offload_active


@pytest.mark.parametrize(
    "wrong", [{"staging_bytes": True}, {"pinned": "no"}, {"deferred": None}, {"verify_seconds": "soon"}], ids=str
)
def test_a_policy_of_wrong_values_is_an_error(wrong):
    """Each value of a policy is checked when it is made; the error names it."""
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}: give"):
        OffloadPolicy(**wrong)


def test_a_move_to_where_no_parameter_is(training):
    """State moves to its parameters only; with and without CUDA in this build the error says so."""
    for device in ("cuda", "cuda:7", "meta"):
        with pytest.raises(ValueError, match="every parameter already is"):
            training.optimizer.move_state_(device)


def test_a_gradient_elsewhere_is_an_error(accelerator, training):
    """No kernel is given a host gradient: the step says where it is, changes nothing and does not poison."""
    training.optimizer.offload_state_()
    training.step(1, True)
    accelerator.unusable.add(id(training.named["tall"].grad))
    witness = Witness(training.optimizer, accelerator)
    with pytest.raises(RuntimeError, match="tall is on cpu and its gradient on cpu"):
        training.optimizer.step()
    witness.check()


def test_plain_extra_entries_stay(accelerator, training):
    """Undeclared numbers and strings are kept through activation and restoration."""
    state = training.optimizer.state[training.named["norm"]]
    state["note"] = ("seen", 3, {"k": None})
    training.optimizer.offload_state_()
    training.optimizer.restore_state_()
    assert training.optimizer.state[training.named["norm"]]["note"] == ("seen", 3, {"k": None})


def test_errors_survive_pickling():
    """A refusal crosses process boundaries with its reason."""
    import pickle

    error = OffloadUnsupportedError(OffloadReason.DTENSOR, "weight is a DTensor")
    again = pickle.loads(pickle.dumps(error))
    assert (again.reason, str(again)) == (error.reason, str(error))
    assert copy.copy(error).reason is error.reason


def test_a_schema_is_needed():
    """Without a schema nothing says what may be streamed."""
    schema = StateSchema((TensorEntry("m", torch.float32, Cut.BLOCKS),))
    assert schema.plain == {}
    subject = refusals.Subject(nn.Module, None, [], {}, {}, None, False)
    refused(lambda: refusals.refuse_structure(subject), "optimizer")
