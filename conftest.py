"""Every test belongs to one tier: those that ask for no rank are the `cpu` tier. How xdist spreads tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

RANK_TIERS = {"gloo2", "gloo4", "gloo8", "gpu1", "gpu2", "gpu4", "gpu8"}
LASTING_FIXTURE = re.compile(r"scope=\"(module|session)\"")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(mark.name in RANK_TIERS for mark in item.iter_markers()):
            item.add_marker("cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests are handed out one by one; those of a file whose fixtures outlive a test stay in one process.

    Each process would make such a fixture anew: minutes in Triton's interpreter, or a whole suite in a child pytest. A
    child pytest below another root spreads its tests as it likes.
    """
    if config.rootpath != Path(__file__).parent:
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def __init__(self) -> None:
            super().__init__(config, log)
            self.whole: dict[str, bool] = {}  # of each file: whether it stays in one process

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            if file not in self.whole:
                self.whole[file] = bool(LASTING_FIXTURE.search((Path(config.rootpath) / file).read_text("utf-8")))
            return file if self.whole[file] else nodeid

    return OneByOne()
