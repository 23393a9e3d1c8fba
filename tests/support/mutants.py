"""The guards of this code: the text that makes each, and a test that fails without it. `ci/mutate` tries them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file`; with `new` in its place each of `tests` fails, and passes without."""

    guard: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, root: Path) -> str:
        """The file's text with the guard removed. Raises ValueError unless `old` occurs exactly once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.guard}: {self.file} has its text {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


ENGINE = "gefen_offload/offload/engine.py"
SESSION = "gefen_offload/offload/session.py"
MIXIN = "gefen_offload/offload/mixin.py"
ANCHORS = "gefen_offload/offload/anchors.py"
REFUSALS = "gefen_offload/offload/refusals.py"
REPLICAS = "gefen_offload/offload/replicas.py"
STAGING = "gefen_offload/offload/staging.py"
LOADING = "gefen_offload/optim/checkpointed.py"
OUTCOME = "gefen_offload/ranks/outcome.py"
COMPARE = "gefen_offload/ranks/compare.py"

RACES = "tests/offload/test_races.py::test_without_sabotage_nothing_differs"
POISON = "tests/offload/test_poison.py::"
MOVERS = "tests/offload/test_movers.py::"
REFUSED = "tests/offload/test_refusals.py::"
LOADED = "tests/offload/test_loading.py::"
AGREED = "tests/offload/test_replicas.py::"
JUDGED = "tests/ranks/test_outcome.py::"


def _of(file: str, *rows: tuple[str, str, str, str]) -> list[Mutant]:
    return [Mutant(guard, file, old, new, (test,)) for guard, old, new, test in rows]


MUTANTS = [
    # stream order
    *_of(
        ENGINE,
        ("update waits for its copy in", "current.wait_event(marks.arrived)", "pass", f"{RACES}[late]"),
        ("copy out waits for its update", "self._outward.wait_event(marks.updated)", "pass", f"{RACES}[late]"),
        (
            "copy in waits for the last copy out of its bytes",
            "                self._inward.wait_event(self._marks[",
            "                pass  # (self._marks[",
            f"{RACES}[late]",
        ),
        (
            "a copy in comes after the copies out before it",
            "windows[coming].after <= index:",
            "windows[coming].after <= index + 1:",
            f"{RACES}[late]",
        ),
        (
            "the host waits for the last copies out",
            "            self._complete.synchronize()\n            self._read_clock()",
            "            pass",
            f"{RACES}[late]",
        ),
        (
            "a prefetch that is not used is forgotten",
            "            self._prefetched = None\n            _drain(self._inward)",
            "            _drain(self._inward)",
            "tests/offload/test_steady.py::test_a_prefetch_is_cancelled_without_writing_back",
        ),
    ),
    # poison
    *_of(
        ENGINE,
        (
            "a step knows when parameters have changed",
            "mutated = True\n",
            "pass\n",
            f"{POISON}test_a_failing_update_poisons[2]",
        ),
        (
            "poison survives a second interruption",
            "            finally:  # a second interruption must not hide that parameters have changed",
            "            finally:\n                pass\n            if True:",
            f"{POISON}test_a_second_interruption_does_not_hide_the_poison",
        ),
        (
            "a deferred failure poisons",
            "raise StepError(cause, names) from cause",
            "raise",
            f"{POISON}test_a_deferred_failure_is_found_by_the_next_reader[state_dict]",
        ),
    ),
    *_of(
        SESSION,
        (
            "a poisoned optimizer does not step",
            "        refusals.refuse_compiling()\n        self.poison.check()\n",
            "        refusals.refuse_compiling()\n",
            f"{POISON}test_a_failing_update_poisons[1]",
        ),
        (
            "a step that is not counted poisons",
            "            self.poison.why = UNCOUNTED\n",
            "",
            f"{POISON}test_an_interruption_before_the_count_poisons[deferred]",
        ),
        (
            "a gradient that no kernel may touch",
            "self._check_compute(piece)",
            "pass",
            f"{REFUSED}test_a_gradient_elsewhere_is_an_error",
        ),
        (
            "state is compared with what was seen last",
            "if not self.anchors.hold(host.param_groups, host.state, self.accelerator.is_compute):",
            "if False:",
            f"{REFUSED}test_a_later_step_refuses[add-a-tensor-custom-state]",
        ),
        (
            "moved state is looked for",
            "if tensor.numel() and self.store.find(tensor) is None:",
            "if False:",
            f"{MOVERS}test_a_mover_is_noticed[new_tensors]",
        ),
    ),
    *_of(
        MIXIN,
        (
            "a poisoned state is not read",
            "            held.settle()\n            held.poison.check()\n        else",
            "            held.settle()\n        else",
            f"{POISON}test_a_failing_update_poisons[1]",
        ),
        (
            "whoever reads waits for the write-back",
            "            held.settle()\n            held.poison.check()\n        else",
            "            held.poison.check()\n        else",
            f"{POISON}test_a_deferred_failure_is_found_by_the_next_reader[state_dict]",
        ),
        (
            "poison outlives restoration",
            "after = poison if poison.why is not None else None",
            "after = None",
            f"{POISON}test_a_committed_load_clears_it[restored]",
        ),
        (
            "a good checkpoint ends the poison",
            "held.poison.why = None",
            "pass",
            f"{POISON}test_a_committed_load_clears_it[offloaded]",
        ),
        (
            "a refused group is taken back",
            "            self.param_groups.pop()\n",
            "",
            f"{REFUSED}test_an_added_group_is_refused_and_taken_back",
        ),
        (
            "an offloaded optimizer is not copied",
            "if self._offload is not None:\n            what, advice",
            "if False:\n            what, advice",
            f"{MOVERS}test_a_copy_is_refused_while_offloaded[deepcopy]",
        ),
        (
            "another policy is an error",
            "if policy != self._offload.policy:",
            "if False:",
            f"{REFUSED}test_another_device_or_policy_is_an_error",
        ),
    ),
    # anchors
    *_of(
        ANCHORS,
        (
            "tensors are compared by address",
            "addresses(tensors) == self.addresses",
            "True",
            f"{MOVERS}test_a_mover_is_noticed[new_data]",
        ),
        (
            "tensors are compared",
            "same(tensors, seen) and addresses(tensors) == self.addresses",
            "True",
            f"{MOVERS}test_a_mover_is_noticed_while_the_old_tensors_live[new_tensors]",
        ),
        (
            "a new entry is noticed",
            "_sizes(entries) == self.sizes",
            "True",
            f"{REFUSED}test_a_later_step_refuses[add-a-tensor-custom-state]",
        ),
    ),
    # refusals
    *_of(
        REFUSALS,
        (
            "custom-state",
            "refuse_custom_state(subject)\n",
            "pass\n",
            f"{REFUSED}test_activation_refuses[hide-a-tensor-custom-state]",
        ),
        (
            "aliased",
            "        refuse_aliases(subject)\n",
            "        pass\n",
            f"{REFUSED}test_activation_refuses[alias-two-states-aliased]",
        ),
        (
            "ownership",
            "    _refuse_ownership(subject)\n",
            "    pass\n",
            f"{REFUSED}test_activation_refuses[drop-a-parameter-ownership]",
        ),
        (
            "subclass",
            "        _refuse_subclass(name, parameter)\n",
            "        pass\n",
            f"{REFUSED}test_a_parameter_subclass_is_refused",
        ),
        (
            "optimizer",
            "    _refuse_optimizer(subject)\n",
            "    pass\n",
            f"{REFUSED}test_an_undeclared_update_is_refused[OwnUpdate]",
        ),
        (
            "capturable",
            "    refuse_graphs(subject, accelerator)\n    refuse_devices",
            "    refuse_devices",
            f"{REFUSED}test_activation_refuses[capture-capturable]",
        ),
        (
            "cpu-parameter",
            "    refuse_devices(subject, accelerator)\n    if state",
            "    if state",
            f"{REFUSED}test_activation_refuses[move-a-parameter-cpu-parameter]",
        ),
        ("mixed-devices", "if len(devices) > 1:", "if False:", f"{REFUSED}test_mixed_devices_are_refused"),
        (
            "compiling",
            "if torch.compiler.is_compiling():",
            "if False:",
            f"{REFUSED}test_compilation_is_refused[activation]",
        ),
    ),
    # replicas
    *_of(
        REPLICAS,
        (
            "values are compared",
            '            if mine != theirs:\n                return f"its values',
            '            if False:\n                return f"its values',
            f"{AGREED}test_any_difference_is_refused_by_all[one-ulp]",
        ),
        (
            "names and shapes are compared",
            '            if mine != theirs:\n                return f"it holds',
            '            if False:\n                return f"it holds',
            f"{AGREED}test_any_difference_is_refused_by_all[another-name]",
        ),
        (
            "a peer's refusal is read",
            "if record is not None and code is not None:",
            "if False:",
            f"{AGREED}test_a_refusing_rank_is_named_by_its_peers[refusing-aliased]",
        ),
        (
            "who gives up leaves word",
            "        pact.refuse(error)\n",
            "        pass\n",
            f"{AGREED}test_who_comes_after_the_deadline_is_told",
        ),
    ),
    # staging and loading
    *_of(
        STAGING,
        (
            "a staged copy has its own storage",
            "if tensor.numel() and address in seen:",
            "if False:",
            "tests/offload/test_staging.py::test_two_copies_may_not_be_one",
        ),
    ),
    *_of(
        LOADING,
        (
            "what is saved is a snapshot",
            "            packed = checkpoint.cloned(packed)\n",
            "            pass\n",
            f"{LOADED}test_what_is_saved_does_not_change",
        ),
        (
            "the codebook is not the checkpoint's",
            "codebook.to(device, copy=True)",
            "codebook.to(device)",
            f"{LOADED}test_nothing_live_is_the_checkpoints",
        ),
    ),
    *_of(
        MIXIN,
        (
            "a load goes to host storage of its own",
            "return held.place([tensors for _, tensors in staged])",
            "return [dict(tensors) for _, tensors in staged]",
            f"{LOADED}test_a_load_goes_to_host_memory_only",
        ),
    ),
    *_of(
        "gefen_offload/optim/matrix_batches.py",
        (
            "batches with other bits are not taken",
            "_tried[key] = _try(key, steps, eps)",
            "_tried[key] = True",
            "tests/optim/test_matrix_batches.py::test_other_bits_are_not_taken[other-bits]",
        ),
    ),
    # the harness
    *_of(
        OUTCOME,
        (
            "a missing outcome is a failure",
            "if not mine:\n",
            "if not mine:\n            continue\n        if False:\n",
            f"{JUDGED}test_missing_outcome",
        ),
        ("a second outcome is a failure", "elif len(mine) > 1:", "elif False:", f"{JUDGED}test_second_outcome"),
        (
            "a peer's echo is secondary",
            "    return lost_peer and any(",
            "    return False and any(",
            f"{JUDGED}test_echo_before_the_cause[Broken pipe]",
        ),
        ("skips must agree", "if len(skips) == world and", "if True or", f"{JUDGED}test_skips"),
    ),
    *_of(
        "gefen_offload/ranks/reaper.py",
        (
            "the lifeline's end kills the ranks",
            "    members, lease_folders = _listen(parent)\n    end(members, [token])",
            "    members, lease_folders = _listen(parent)\n    os._exit(0)",
            "tests/ranks/test_death.py::test_signal_to_the_parent[SIGKILL]",
        ),
    ),
]
