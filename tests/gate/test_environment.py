"""Finding or making an interpreter: where it may stand, what is left alone, and an interruption halfway."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gefen_offload.gate import checks, environment, run
from support.checkout import ROOT

CONSTRAINTS = ROOT / "ci" / "constraints.txt"


@pytest.fixture
def root(tmp_path):
    """A checkout with constraints, in a path with a space."""
    folder = tmp_path / "a checkout"
    (folder / "ci").mkdir(parents=True)
    shutil.copy(CONSTRAINTS, folder / "ci" / "constraints.txt")
    return folder


@pytest.fixture
def bare(monkeypatch):
    """As if this interpreter had neither torch nor pytest, and as if an environment's Python always started."""
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "starts", lambda folder, code: True)


@pytest.fixture
def installs(monkeypatch):
    """What would be installed, without a network."""
    done = []
    monkeypatch.setattr(environment, "make", lambda folder: (folder / "bin").mkdir())
    monkeypatch.setattr(environment, "install", lambda python, *arguments: done.append(arguments))
    return done


def test_the_current_interpreter_is_used_as_it_is(root, installs):
    """With torch and pytest here nothing is made, so a GPU box keeps its own build and needs no network."""
    assert environment.interpreter(root) == sys.executable
    assert installs == []


def test_torch_is_installed_first(root, bare, installs):
    """The environment stands in the checkout, and torch comes before everything else."""
    assert environment.interpreter(root) == str(root / ".venv" / "bin" / "python")
    assert installs[0][2:] == ("torch", "setuptools", "wheel")
    assert installs[1] == ("-r", str(root / "ci" / "constraints.txt"))


def test_a_finished_environment_is_used_again(root, bare, installs):
    """The second command installs nothing."""
    environment.interpreter(root)
    installs.clear()
    environment.interpreter(root)
    assert installs == []


def test_other_constraints_make_it_anew(root, bare, installs):
    """Changed pins are another environment."""
    environment.interpreter(root)
    installs.clear()
    (root / "ci" / "constraints.txt").write_text("torch==9.9\n")
    environment.interpreter(root)
    assert len(installs) == 2


def test_an_interruption_halfway_starts_anew(root, bare, installs, monkeypatch):
    """What an interrupted run left is removed, and the next run makes a whole environment."""

    def interrupted(python, *arguments):
        (root / ".venv" / "half").write_text("")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.interpreter(root)
    assert not environment.complete(root / ".venv", CONSTRAINTS)
    environment.interpreter(root)
    assert not (root / ".venv" / "half").exists()
    assert environment.complete(root / ".venv", CONSTRAINTS)


def test_a_persons_own_environment_is_used_and_not_changed(root, bare, installs):
    """A .venv that was not made here and has what is needed is taken as it is."""
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").write_text("")
    assert environment.interpreter(root) == str(root / ".venv" / "bin" / "python")
    assert installs == []
    assert not (root / ".venv" / environment.MARKER).exists()


def test_a_persons_own_folder_is_not_built_in(root, bare, installs, monkeypatch, tmp_path):
    """A .venv of somebody's that lacks torch stays as it is, and ours is made in the cache."""
    monkeypatch.setattr(environment, "theirs", lambda folder: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (root / ".venv").mkdir()
    (root / ".venv" / "notes.txt").write_text("mine")
    assert environment.interpreter(root).startswith(str(tmp_path / "cache"))
    assert [path.name for path in (root / ".venv").iterdir()] == ["notes.txt"]


def test_a_checkout_that_cannot_be_written(root, bare, installs, monkeypatch, tmp_path):
    """Where the checkout is read-only the cache is used, and where that is too, a temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    (root / ".venv").write_text("in the way")
    (tmp_path / "temporary").mkdir()
    assert environment.interpreter(root).startswith(str(tmp_path / "temporary"))


def test_a_place_can_be_named(root, bare, installs, monkeypatch, tmp_path):
    """GEFEN_OFFLOAD_VENV comes first."""
    monkeypatch.setenv("GEFEN_OFFLOAD_VENV", str(tmp_path / "here"))
    assert environment.interpreter(root) == str(tmp_path / "here" / "bin" / "python")


def test_what_the_tests_import_is_asked_for(monkeypatch):
    """The table is the extra `test`, but for pytest and its plugins; a Python that lacks one of it is told which."""
    extra = re.search(r"^test = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    packages = {re.match(r"[a-z-]+", name)[0] for name in re.findall(r'"(.*?)"', extra[1])}
    assert {name for name in packages if "pytest" not in name} == {*environment.TESTS_IMPORT.values()} - {"triton"}
    assert environment.lacking() == ""
    monkeypatch.setitem(environment.TESTS_IMPORT, "no_such_module", "such-a-package")
    assert "pip install -c ci/constraints.txt such-a-package" in environment.lacking()


def test_a_python_without_it_is_unfit(monkeypatch, tmp_path, capsys):
    """The gate exits with 3 before it builds anything, and the tests of ./ci/test fail, both with what to do."""
    monkeypatch.setitem(environment.TESTS_IMPORT, "no_such_module", "such-a-package")
    assert run.own(ROOT, run.Options(run_dir=str(tmp_path / "run"))) == 3
    assert "such-a-package" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    code, why = checks.tests(checks.Place(ROOT, ROOT, tmp_path), [])
    assert code == 1
    assert "such-a-package" in why


def test_a_check_that_was_asked_for_must_run(capsys):
    """A tool that is missing is said; where its check was asked for by name that is a failure."""
    result = checks.Result("lint", None, why="ruff is not installed here")
    assert (checks.closing([result], asked=[]), checks.closing([result], asked=["lint"])) == (0, 1)
    assert capsys.readouterr().out.count("not run") == 2


def test_an_old_python_is_told_what_to_do(root, monkeypatch):
    """Python 3.9 gets a sentence, not a traceback from some import."""
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 18))
    with pytest.raises(environment.NoInterpreterError, match="PYTHON=/path/to/python"):
        environment.interpreter(root)


def test_a_failing_pip_is_told_what_to_do():
    """The command that failed and the way without a network are named."""
    with pytest.raises(environment.NoInterpreterError, match="already has torch and pytest"):
        environment.run_pip([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_start_script_needs_a_python(tmp_path):
    """Without any Python on PATH, ci/start says so and exits with 2."""
    for name in ("sh", "dirname", "env"):
        (tmp_path / name).symlink_to(Path(shutil.which(name) or ""))
    done = subprocess.run([str(ROOT / "ci" / "gate")], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no Python 3.10 or newer: none on PATH" in done.stderr


def test_a_named_python_that_does_not_start_is_an_error(tmp_path):
    """PYTHON names the interpreter; another one is not taken instead."""
    done = subprocess.run(
        [str(ROOT / "ci" / "gate")], env={**os.environ, "PYTHON": "/no/such"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no Python 3.10 or newer: /no/such" in done.stderr


@pytest.mark.parametrize("safe", ["", "1"], ids=["usual", "safe-path"])
def test_the_path_begins_with_the_checkout(tmp_path, safe):
    """With and without a folder that Python puts first (PYTHONSAFEPATH): the checkout is, and no other is lost."""
    (tmp_path / "gefen_offload").mkdir()
    (tmp_path / "gefen_offload" / "__init__.py").touch()
    (tmp_path / "gefen_offload" / "cli.py").write_text("import sys\ndef main(): print(sys.path[:2], sys.argv[1:])\n")
    variables = {"PYTHONPATH": "/elsewhere", "PYTHONSAFEPATH": safe}
    done = subprocess.run(
        [sys.executable, "-c", environment.START, str(tmp_path), "--one"], env=variables, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"{[str(tmp_path), '/elsewhere']} ['--one']"


def test_the_start_script_runs_from_anywhere(tmp_path):
    """ci/start works from another folder and through PYTHON, and hands the arguments on."""
    done = subprocess.run(
        [str(ROOT / "ci" / "start"), "gate", "run", "--tests", "/no/such", "--mandatory", "/no/such"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "GEFEN_OFFLOAD_VENV": str(tmp_path / "venv"), "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "no such folder" in done.stderr
