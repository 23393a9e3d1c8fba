"""A pytest plugin that writes each phase's report as one line of JSON, flushed at once."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    text = report.longreprtext + "".join(f"\n[{title}]\n{content}" for title, content in report.sections)
    line = {
        "name": report.nodeid.rpartition("::")[2],
        "when": report.when,
        "outcome": report.outcome,
        "text": text,
        "seconds": report.duration,
        "properties": report.user_properties,
    }
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        with open(os.environ["REPORT_LINES"], "a") as file:
            file.write(json.dumps(line) + "\n")
