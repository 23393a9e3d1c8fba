"""The list of guards does not rot: each is where the list says, and its test exists. `ci/mutate` removes them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.mutants import MUTANTS, ROOT


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=[f"{m.file.rpartition('/')[2]}-{m.guard}".replace(" ", "-") for m in MUTANTS]
)
def test_a_guard_is_where_the_list_says(mutant):
    """Its text occurs once in its file, what takes its place compiles, and its tests are there."""
    compile(mutant.applied(ROOT), mutant.file, "exec")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_a_name_that_no_guard_has_is_refused():
    """`-k` with a typing error is wrong usage; pytest without test ids would run the whole suite."""
    command = [sys.executable, ROOT / "ci/mutate", "-k", "no such"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "-k no such: in no guard's name or file" in done.stderr
