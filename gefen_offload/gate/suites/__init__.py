"""The gate's own sessions, run from the judged wheel: the smoke test, and the measurements."""
