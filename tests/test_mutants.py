"""The list of guards does not rot: each is where the list says, and its test exists. `ci/mutate` removes them."""

from __future__ import annotations

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
