"""The command line as a person or another project uses it, each command in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest

from gefen_offload import __version__
from gefen_offload.gate import cli, run
from support.checkout import ROOT, command, git

SUITE = """
def test_one():
    assert 1 + 1 == 2

def test_two():
    assert {two}
"""


def project(folder, two="True", mandatory="test_it.py::test_one\ntest_it.py::test_two\n"):
    """Another project's suite, with its mandatory list."""
    (folder / "suite").mkdir()
    (folder / "suite" / "test_it.py").write_text(SUITE.format(two=two))
    (folder / "mandatory.txt").write_text(mandatory)
    return folder


def judge(folder, *more, run="run", **variables):
    """``gate run`` on that project."""
    arguments = ["--tests", str(folder / "suite"), "--mandatory", str(folder / "mandatory.txt")]
    return command("gate", "run", *arguments, "--run-dir", str(folder / run), *more, cwd=folder, **variables)


@pytest.mark.parametrize(
    ("two", "mandatory", "code", "says"),
    [
        ("True", "test_it.py::test_one\ntest_it.py::test_two\n", 0, "PASS"),
        ("False", "test_it.py::test_one\ntest_it.py::test_two\n", 1, "FAILED x1"),
        ("False", "test_it.py::test_one\n", 1, "UNLISTED_FAILURE x1"),
        ("True", "test_it.py::test_one\n", 0, "PASS"),
        ("True", "test_it.py::test_three\n", 4, "MISSING x1"),
        ("True", "", 4, "EMPTY_LIST x1"),
        ("True", "test_it.py::test_one\ntest_it.py::test_one\n", 4, "LIST_EDITED x1"),
    ],
    ids=["pass", "fail", "fail-outside", "list-of-a-part", "missing", "empty-list", "listed-twice"],
)
def test_a_foreign_suite_is_judged(tmp_path, two, mandatory, code, says):
    """Another project's suite gets the exit code and the reason that ours would get, and no release verdict."""
    done = judge(project(tmp_path, two, mandatory))
    assert done.returncode == code, done.stderr
    assert says in done.stdout
    assert "not a release verdict: another project's suite" in done.stdout.splitlines()[0]


@pytest.mark.parametrize("option", ["--tier", "--wheel", "--commit"])
def test_a_foreign_suite_takes_no_option_of_ours(tmp_path, option):
    """What would choose another part or another wheel is refused, as it would be ignored."""
    done = judge(project(tmp_path), option, "cpu")
    assert done.returncode == 2
    assert f"{option}: for this checkout alone" in done.stderr


def test_what_a_foreign_suite_does_not_have_is_not_called_passed(tmp_path):
    """Without a checkout there is no source, and without --package there are no files to look at: both are not run."""
    rows = dict(line.split(maxsplit=1) for line in judge(project(tmp_path)).stdout.splitlines() if "  " in line)
    assert (rows["source"], rows["wheel"], rows["machine"]) == ("not run", "not run", "PASS")


def test_a_wheel_that_is_not_there_is_named_before_a_run_begins(tmp_path):
    """A mistyped --wheel is a mistake of the command line, and leaves no run directory."""
    done = command("gate", "run", "--wheel", str(tmp_path / "no.whl"), "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "there is no such file" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_deadline_ends_a_foreign_suite(tmp_path):
    """--timeout is the session's deadline."""
    folder = project(tmp_path, two="__import__('threading').Event().wait()")
    done = judge(folder, "--timeout", "4")
    assert done.returncode == 1
    assert "DEADLINE x1" in done.stdout


def test_a_foreign_package_must_be_the_one_imported(tmp_path):
    """--package binds the verdict to the files of that package that the session really imported."""
    folder = project(tmp_path, two="__import__('widget').answer() == 42")
    (folder / "widget.py").write_text("def answer():\n    return 42\n")
    passed = judge(folder, "--package", "widget", PYTHONPATH=str(folder))
    assert passed.returncode == 0, passed.stdout + passed.stderr
    (folder / "suite" / "widget.py").write_text("def answer():\n    return 42  # a copy\n")
    (folder / "suite" / "conftest.py").write_text("import sys; sys.path.insert(0, __file__.rpartition('/')[0])\n")
    shadowed = judge(folder, "--package", "widget", run="again", PYTHONPATH=str(folder))
    assert shadowed.returncode == 4
    assert "IMPORT_SHADOWED" in shadowed.stdout


def test_the_run_directory_is_complete(tmp_path):
    """Every promised file is there, and the step summary got the same words."""
    folder = project(tmp_path)
    judge(folder, GITHUB_STEP_SUMMARY=str(folder / "step.md"))
    names = {path.name for path in (folder / "run").iterdir()}
    promised = {
        "facts.json",
        "record.jsonl",
        "verdict.json",
        "summary.md",
        "report.html",
        "junit.xml",
        "statement.json",
    }
    assert promised <= names
    assert (folder / "step.md").read_text() == (folder / "run" / "summary.md").read_text()
    assert "2 passed" in (folder / "run" / "sessions" / "suite.log").read_text()


def test_a_kept_run_is_not_written_over(tmp_path):
    """A second run into the same folder is refused: the first one's evidence stays what it was."""
    folder = project(tmp_path)
    judge(folder)
    kept = (folder / "run" / "record.jsonl").read_bytes()
    assert judge(folder).returncode == 2
    assert (folder / "run" / "record.jsonl").read_bytes() == kept


def test_show_decides_again(tmp_path):
    """``gate show`` prints the kept verdict with its exit code, and notices a verdict, or a record, that was edited."""
    folder = project(tmp_path, two="False")
    judge(folder)
    run = folder / "run"
    assert command("gate", "show", str(run), "--report", str(folder / "again.html")).returncode == 1
    assert (folder / "again.html").read_text() == (run / "report.html").read_text()
    verdict = json.loads((run / "verdict.json").read_text())
    (run / "verdict.json").write_text(json.dumps({**verdict, "exit_code": 0, "findings": []}))
    edited = command("gate", "show", str(run))
    assert edited.returncode == 4
    assert "does not follow from the evidence" in edited.stdout
    record = run / "sessions" / "suite.jsonl"
    record.write_text(record.read_text().replace("failed", "passed"))
    assert "RECORD_EDITED" in command("gate", "show", str(run)).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("launch",),
        ("gate",),
        ("gate", "run", "--tests", "/no/such/folder", "--mandatory", "/no/such/file"),
        ("gate", "run", "--tests", "."),
        ("gate", "run", "--require", "gpu3"),
        ("gate", "manifest"),
        ("gate", "run", "--tests", ".", "--mandatory", "pyproject.toml", "--package", "no_such_package"),
    ],
    ids=["nothing", "unknown", "no-action", "no-folder", "half", "unknown-tier", "manifest-how", "no-package"],
)
def test_wrong_usage_is_exit_2(arguments):
    """A command line that makes no sense ends with 2 and a sentence."""
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stdout + done.stderr


@pytest.mark.parametrize("facts", [None, "", "[]", '{"sessions": 1}'], ids=["none", "empty", "list", "odd"])
def test_show_of_nothing_is_incomplete_evidence(tmp_path, facts):
    """A folder that is no run directory, or holds anything else in its place, has no verdict, and no traceback."""
    if facts is not None:
        for name in ("facts.json", "manifest.json", "baseline.json"):
            (tmp_path / name).write_text(facts)
    done = command("gate", "show", str(tmp_path))
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith(f"gefen-offload gate show: {tmp_path} is no complete run directory: ")


def test_an_error_of_the_gates_own_is_no_failure_of_the_product(capsys):
    """Whatever the gate did not expect ends with 4 and says where it was: 1 would blame what is judged."""

    def broken(arguments):
        raise ZeroDivisionError("of its own")

    assert cli.main(argparse.Namespace(run=broken, action="run")) == 4
    said = capsys.readouterr().err
    assert "in broken" in said
    assert said.endswith("did not come to its end: an error of its own: ZeroDivisionError: of its own\n")


@pytest.mark.parametrize("name", ["gate", "doctor"])
def test_what_the_command_needs_is_named(name):
    """Without pytest there is a sentence and exit code 2, and no traceback."""
    start = "import sys; sys.modules['pytest'] = None; from gefen_offload.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", start, name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gefen-offload {name} needs pytest: pip install")


def test_a_list_written_from_another_folder_is_told(tmp_path):
    """Ids that are relative to something else than the suite's folder: the verdict names the test that is there."""
    folder = project(tmp_path)
    (folder / "mandatory.txt").write_text("suite/test_it.py::test_one\n")
    arguments = ["--tests", str(folder / "suite"), "--mandatory", str(folder / "mandatory.txt")]
    done = command("gate", "run", *arguments, cwd=folder)
    assert done.returncode == 4
    assert "there is test_it.py::test_one: ids are relative to the suite's folder" in done.stdout


def test_doctor_names_the_tiers():
    """``doctor`` says which tiers this machine can run."""
    done = command("doctor", CUDA_VISIBLE_DEVICES="")
    assert "can run: cpu, gloo2, gloo4" in done.stdout


def test_the_version_can_be_asked_for():
    """``gefen-offload --version`` is the package's version."""
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"gefen-offload {__version__}\n")


def test_evidence_beside_a_suite_is_ignored_by_git(tmp_path):
    """The run directory that the gate makes in a suite's folder is never seen as a change of that project."""
    folder = project(tmp_path)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "suite")
    arguments = ["--tests", str(folder / "suite"), "--mandatory", str(folder / "mandatory.txt")]
    assert command("gate", "run", *arguments, cwd=folder, PYTHONDONTWRITEBYTECODE="1").returncode == 0
    assert len(list((folder / "suite" / ".gate").iterdir())) == 1
    assert git(folder, "status", "--porcelain") == ""
    assert command("gate", "run", *arguments, "--run-dir", str(folder / "mine"), cwd=folder).returncode == 0
    assert git(folder, "status", "--porcelain", "--", "mine") == ""


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf", "soon"])
def test_a_deadline_is_a_number_of_seconds(tmp_path, seconds):
    """A deadline that never or already passed is a mistake of the command line, and leaves no run directory."""
    done = judge(project(tmp_path), f"--timeout={seconds}")
    assert done.returncode == 2
    assert "argument --timeout: " in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tier", "gpu1", "--only", "tests/gate/test_verdict.py"), "no mandatory test of gpu1 is there"),
        (("--run-dir", "tests/gate/run"), "which is judged"),
        (("--tests", "tests/gate", "--mandatory", "ci/mandatory/cpu.txt", "--run-dir", "tests/gate/run"), "is judged"),
        (("--tests", "tests/gate", "--mandatory", "ci/mandatory/cpu.txt", "--package", "sys"), "no file of such a"),
        (("--tests", "tests/gate", "--mandatory", "ci/mandatory/cpu.txt", "--package", "no.package"), "no file of"),
    ],
    ids=["nothing-to-run", "run-dir-in-tests", "run-dir-in-suite", "built-in", "no-parent"],
)
def test_what_could_not_be_judged_is_refused(arguments, says):
    """A command line under which nothing, or the evidence itself, would be judged is a mistake with a sentence."""
    done = command("gate", "run", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (ROOT / "tests" / "gate" / "run").exists()


def test_a_namespace_package_is_judged_in_all_its_folders(tmp_path, monkeypatch):
    """A package without an __init__.py has the files of every folder of its name; one that is not there has none."""
    for folder, name in (("one", "a.py"), ("two", "b.py")):
        (tmp_path / folder / "spread").mkdir(parents=True)
        (tmp_path / folder / "spread" / name).write_text("")
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = run.package_files("spread")
    assert sorted(found) == [str(tmp_path / "one" / "spread" / "a.py"), str(tmp_path / "two" / "spread" / "b.py")]
    assert [run.package_files(name) for name in (None, "sys", "no_such", "no.such", ".such")] == [{}] * 5


def test_a_file_added_to_the_package_during_the_run_is_noticed(tmp_path):
    """A test that writes a new module into the judged package has changed what is judged."""
    folder = project(tmp_path, two="__import__('pathlib').Path(__import__('widget').__file__, '../new.py').resolve()")
    (folder / "widget").mkdir()
    (folder / "widget" / "__init__.py").write_text("")
    text = (folder / "suite" / "test_it.py").read_text()
    (folder / "suite" / "test_it.py").write_text(text.replace(".resolve()", ".resolve().write_text('1')"))
    done = judge(folder, "--package", "widget", PYTHONPATH=str(folder))
    assert done.returncode == 4
    assert "WHEEL_CHANGED x1" in done.stdout
    assert str(folder / "widget" / "new.py") in done.stdout


def test_a_suite_inside_its_package_is_judged(tmp_path):
    """The gate's own evidence beside such a suite, and other hidden files, are no part of the package."""
    tests = tmp_path / "widget" / "tests"
    tests.mkdir(parents=True)
    (tmp_path / "widget" / "__init__.py").write_text("")
    (tests / "test_it.py").write_text("import widget\ndef test_one(): open('.cache', 'w').close()\n")
    (tmp_path / "mandatory.txt").write_text("test_it.py::test_one\n")
    arguments = ["--tests", str(tests), "--mandatory", str(tmp_path / "mandatory.txt"), "--package", "widget"]
    done = command("gate", "run", *arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tests / ".gate").is_dir()


@pytest.mark.parametrize(
    ("place", "says"),
    [("mandatory.txt", "Not a directory"), ("mandatory.txt/run", "Not a directory"), ("/proc/run", "/proc/run")],
    ids=["file", "below-a-file", "proc"],
)
def test_a_run_directory_that_cannot_be_is_no_failure_of_the_product(tmp_path, place, says):
    """A folder that cannot be made is a line and exit code 4, and no traceback."""
    done = judge(project(tmp_path), run=place)
    assert (done.returncode, done.stdout) == (4, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


LOSES = "__import__('shutil').rmtree(__import__('pathlib').Path.cwd().parent / 'run') is None"


@pytest.mark.parametrize(
    ("two", "step", "code", "first", "says"),
    [
        ("True", "", 4, "PASS", "Is a directory"),
        ("False", "", 1, "FAIL", "Is a directory"),
        (LOSES, "step.md", 4, "INCOMPLETE: the evidence could not be kept", "No such file or directory"),
    ],
    ids=["pass", "fail", "lost"],
)
def test_the_verdict_is_said_whatever_cannot_be_written(tmp_path, two, step, code, first, says):
    """A summary or evidence that cannot be written hides no verdict, and lets none pass."""
    done = judge(project(tmp_path, two), GITHUB_STEP_SUMMARY=str(tmp_path / step))
    assert done.returncode == code
    assert done.stdout.startswith(first)
    assert "tests        suite" in done.stdout
    assert says in done.stderr
    assert "Traceback" not in done.stderr
