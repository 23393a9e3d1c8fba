"""Tests that vanished or multiplied before any ran, and tests of several ranks whose ranks are not proven."""

from __future__ import annotations

from dataclasses import replace

from gefen_offload.gate.reason import Reason
from gefen_offload.gate.selftest.case import IDS, SUITE, Case, Suite, suite_case
from gefen_offload.gate.selftest.outcomes import TWO, hooked

ONE = (IDS[0],)
PROOF = """
    import pytest
    @pytest.mark.gpu2
    def test_one(record_property):
        record_property("ranks", {proof})
"""


MEDDLER = """
    class Meddler:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items):
            {does}
    def pytest_sessionstart(session):
        session.config.pluginmanager.register(Meddler())
"""


def two_gpus(**changes: object) -> Suite:
    """A test of two GPUs that notes this proof."""
    proof = {"world": 2, "backend": "nccl", "devices": ["GPU-a", "GPU-b"], "finished": [0, 1], **changes}
    return Suite({"test_it.py": PROOF.format(proof=proof)}, ids=ONE, tier="gpu2")


def proof_case(name: str, reason: Reason, **changes: object) -> Case:
    """A case whose twin differs in the proof alone."""
    return suite_case(name, reason, broken=two_gpus(**changes), clean=two_gpus())


def extended(suite: Suite) -> Suite:
    """The suite with one more file, the same test in it, and the same list."""
    return replace(suite, files={**suite.files, "test_new.py": suite.files["test_it.py"]})


CASES: list[Case] = [
    suite_case("deleted", Reason.MISSING, broken=Suite({"test_it.py": TWO})),
    suite_case(
        "renamed",
        Reason.MISSING,
        Reason.UNLISTED,
        broken=Suite(
            {
                "test_it.py": TWO
                + """
    def test_uno():
        assert 1 + 1 == 2
"""
            }
        ),
    ),
    suite_case(
        "renamed out of collection",
        Reason.MISSING,
        broken=Suite(
            {
                "test_it.py": TWO
                + """
    def check_one():
        assert 1 + 1 == 2
"""
            }
        ),
    ),
    suite_case(
        "defined twice",
        Reason.SHADOWED,
        broken=Suite(
            {
                "test_it.py": SUITE
                + """
    def test_one():
        assert True
"""
            }
        ),
    ),
    suite_case("collected twice", Reason.DUPLICATED, broken=hooked(MEDDLER.format(does="items.append(items[0])"))),
    suite_case("dropped by a hook", Reason.DESELECTED, broken=hooked(MEDDLER.format(does="del items[0]"))),
    suite_case(
        "moved to another tier",
        Reason.DESELECTED,
        broken=Suite({"test_it.py": SUITE}, ids=ONE, tier="gpu2"),
        clean=two_gpus(),
    ),
    suite_case(
        "two tiers",
        Reason.WRONG_TIER,
        Reason.NO_RANK_PROOF,
        broken=Suite(
            {
                "test_it.py": """
    import pytest
    @pytest.mark.gloo2
    @pytest.mark.cpu
    def test_one():
        assert 1 + 1 == 2
"""
                + TWO
            }
        ),
    ),
    suite_case("new GPU test outside the list", Reason.UNLISTED, broken=extended(two_gpus()), clean=two_gpus()),
    proof_case("one GPU pretending to be two", Reason.ONE_GPU_AS_MANY, devices=["GPU-a", "GPU-a"]),
    proof_case("a rank returned early", Reason.RANK_RETURNED_EARLY, finished=[0]),
    proof_case("a GPU that is not there", Reason.UNKNOWN_GPU, devices=["GPU-a", "GPU-z"]),
    proof_case("one rank for two", Reason.NO_RANK_PROOF, world=1, devices=["GPU-a"], finished=[0]),
    suite_case(
        "no ranks at all",
        Reason.NO_RANK_PROOF,
        clean=two_gpus(),
        broken=Suite(
            {
                "test_it.py": """
    import pytest
    @pytest.mark.gpu2
    def test_one():
        assert 1 + 1 == 2
"""
            },
            ids=ONE,
            tier="gpu2",
        ),
    ),
]
