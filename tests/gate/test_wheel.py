"""The wheel: built offline from the sources alone, the same every time, and the thing that is imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gefen_offload
from gefen_offload.gate import checkout, wheel
from support.checkout import ROOT


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small copy of the checkout's packaging, in a path with a space, with rubbish that must stay out."""
    root = tmp_path_factory.mktemp("a checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    package = root / checkout.PACKAGE
    for name in ("__init__.py", "py.typed", "cli.py", "gate/__init__.py", "gate/templates/report.html.j2"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / checkout.PACKAGE / name, package / name)
    (root / "build" / "lib" / checkout.PACKAGE).mkdir(parents=True)
    (root / "build" / "lib" / checkout.PACKAGE / "stale.py").write_text("old = True\n")
    return root


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    return wheel.build(source, sys.executable, tmp_path_factory.mktemp("dist"))


def test_the_wheel_is_the_source(source, built, tmp_path):
    """The installed files are the package's files, templates included; an old build folder leaves no trace."""
    installed = wheel.install(built, tmp_path / "site", source)
    assert installed.differs == ()
    assert f"{checkout.PACKAGE}/gate/templates/report.html.j2" in installed.files
    assert not any("stale" in name for name in installed.files)


def test_building_writes_nothing_into_the_checkout(source, built):
    """A checkout that cannot be written can be built from: nothing appears beside the sources."""
    assert sorted(path.name for path in source.iterdir()) == sorted(
        ["LICENSE", "README.md", "build", checkout.PACKAGE, "pyproject.toml"]
    )


def test_the_same_source_gives_the_same_digest(source, built, tmp_path):
    """Building again gives the same bytes, so a statement about a digest is one about a source."""
    assert wheel.sha256(wheel.build(source, sys.executable, tmp_path)) == wheel.sha256(built)


def test_a_stale_wheel_names_its_files(source, built, tmp_path):
    """Changed, new and deleted files of the checkout are each named against an older wheel."""
    changed = tmp_path / "changed"
    shutil.copytree(source, changed)
    (changed / checkout.PACKAGE / "cli.py").write_text("# another\n")
    (changed / checkout.PACKAGE / "new.py").write_text("")
    (changed / checkout.PACKAGE / "py.typed").unlink()
    installed = wheel.install(built, tmp_path / "site", changed)
    assert installed.differs == tuple(f"{checkout.PACKAGE}/{name}" for name in ("cli.py", "new.py", "py.typed"))


INFO = f"{checkout.PACKAGE}-{gefen_offload.__version__}.dist-info"


def tampered(built, into, name, added):
    """The wheel with something added to one of its files, which may be a new one."""
    changed = into / built.name
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(changed, "w") as new:
        contents = {entry: old.read(entry) for entry in old.namelist()}
        for entry, content in {**contents, name: contents.get(name, b"") + added.encode()}.items():
            new.writestr(entry, content)
    return changed


@pytest.mark.parametrize(
    ("name", "added", "says"),
    [
        ("evil.pth", "import os\n", "evil.pth"),
        ("torch_extras/__init__.py", "", "torch_extras/__init__.py"),
        (f"{checkout.PACKAGE}-9.data/scripts/run", "#!python\n", f"{checkout.PACKAGE}-9.data/scripts/run"),
        ("other-1.0.dist-info/METADATA", "", "other-1.0.dist-info/METADATA"),
        (f"{INFO}/entry_points.txt", "\n[pytest11]\nevil = os\n", f"{INFO}/entry_points.txt: [pytest11] evil = os"),
        (f"{INFO}/entry_points.txt", "no section, no value\n", INFO),
        (f"{INFO}/licenses/LICENSE", "but not for you\n", f"{INFO}/licenses/LICENSE: but not for you"),
        (f"{INFO}/RECORD", "../../bin/python,,\n", f"{INFO}/RECORD: ../../bin/python"),
    ],
    ids=["pth", "package", "scripts", "other-metadata", "entry-point", "no-entry-point", "license", "record"],
)
def test_what_stands_beside_the_package_is_compared(source, built, tmp_path, name, added, says):
    """Files that an installer would put elsewhere, and metadata that pyproject.toml does not ask for, are named."""
    installed = wheel.install(tampered(built, tmp_path, name, added), tmp_path / "site", source)
    assert any(line.startswith(says) for line in installed.differs), installed.differs


@pytest.mark.parametrize("line", ["Requires-Dist: evil", "Provides-Extra: evil", "Requires-Python: >=2"])
def test_metadata_that_installers_act_on_is_compared(source, built, tmp_path, line):
    """A requirement, an extra or a Python that pyproject.toml does not name is said."""
    site = tmp_path / "site"
    wheel.install(built, site, source)
    path = site / INFO / "METADATA"
    path.write_text(f"{line}\n{path.read_text()}")
    assert wheel.differences(built.name, site, wheel.installed(site), source) == (f"{INFO}/METADATA: {line}",)


def test_a_wheel_under_another_name_is_named(source, built, tmp_path):
    """The name decides what an index offers it as."""
    other = shutil.copy(built, tmp_path / f"{checkout.PACKAGE}-9.0-py3-none-any.whl")
    (says,) = wheel.install(Path(other), tmp_path / "site", source).differs
    assert says == f"{checkout.PACKAGE}-9.0-py3-none-any.whl: this checkout's is {built.name}"


def test_what_is_no_wheel_is_told(tmp_path):
    """A file that is no archive is an error that names it."""
    (tmp_path / "a.whl").write_text("not a wheel")
    with pytest.raises(wheel.WheelError, match=r"a\.whl cannot be unpacked: File is not a zip file"):
        wheel.install(tmp_path / "a.whl", tmp_path / "site", None)


def test_a_file_changed_after_the_run_shows(source, built, tmp_path):
    """Reading the installed wheel again after a file changed gives another reading."""
    installed = wheel.install(built, tmp_path / "site", source)
    assert wheel.again(installed, built) == installed
    (tmp_path / "site" / "patch.pth").write_text("import os\n")
    assert wheel.again(installed, built) != installed


def test_a_build_that_fails_says_what_to_do(source, tmp_path):
    """A broken pyproject is a clear error that names --wheel."""
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    (broken / "pyproject.toml").write_text("[project\n")
    with pytest.raises(wheel.WheelError, match="--wheel FILE"):
        wheel.build(broken, sys.executable, tmp_path / "dist")


def test_the_view_shows_the_checkout_with_its_plugin(tmp_path):
    """Through the view the checkout's package is importable and its pytest plugin is found as installed."""
    path = checkout.view(ROOT, tmp_path / "view")
    code = (
        "import importlib.metadata as m, gefen_offload; print(gefen_offload.__file__);"
        "print([e.value for e in m.entry_points(group='pytest11') if e.name == 'gefen_offload_ranks'][0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(path)}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [str(path / "gefen_offload" / "__init__.py"), "gefen_offload.ranks.plugin"]
