"""What several files of the harness's tests use."""

from __future__ import annotations

import pytest

from support.mortal import Mortal


@pytest.fixture
def start_mortal():
    """Starts a `Mortal`; one that still runs when the test has ended, which then has failed, is killed."""
    started: list[Mortal] = []

    def start(*arguments) -> Mortal:
        started.append(Mortal(*arguments))
        return started[-1]

    yield start
    for mortal in started:
        mortal.child.process.kill()
        mortal.child.process.wait()
