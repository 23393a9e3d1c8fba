"""What identifies the source: commit, dirt, digest, and a copy without git."""

from __future__ import annotations

import os
import re

import pytest

from gefen_offload.gate import checkout
from support.checkout import git


@pytest.fixture
def tree(tmp_path):
    """A repository with one commit."""
    (tmp_path / "gefen_offload").mkdir()
    (tmp_path / "gefen_offload" / "a.py").write_text("a = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


def test_a_clean_checkout(tree):
    """The commit is git's, and nothing is dirty."""
    found = checkout.source(tree)
    assert (found.commit, found.claimed, found.dirty) == (git(tree, "rev-parse", "HEAD"), False, ())


def test_changed_and_new_files_are_dirt(tree):
    """Both an edit and an untracked file are listed, and the digest moves."""
    clean = checkout.source(tree)
    (tree / "gefen_offload" / "a.py").write_text("a = 2\n")
    (tree / "new.txt").write_text("")
    found = checkout.source(tree)
    assert found.dirty == (" M gefen_offload/a.py", "?? new.txt")
    assert found.digest != clean.digest


def test_caches_do_not_count(tree):
    """Compiled files change no digest."""
    before = checkout.digest(tree)
    (tree / "gefen_offload" / "__pycache__").mkdir()
    (tree / "gefen_offload" / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert checkout.digest(tree) == before


def test_a_copy_without_git_has_a_digest_only(tmp_path):
    """Without git there is no commit, unless one is claimed."""
    (tmp_path / "gefen_offload").mkdir()
    assert checkout.source(tmp_path).commit is None
    claimed = checkout.source(tmp_path, "f" * 40)
    assert (claimed.commit, claimed.claimed) == ("f" * 40, True)
    assert checkout.contradiction(tmp_path, "f" * 40) == ""


def test_a_commit_is_claimed_only_where_git_names_none(tree):
    """In a checkout ``--commit`` may name what git names, which is then read and not claimed, and nothing else."""
    commit = git(tree, "rev-parse", "HEAD")
    assert not checkout.source(tree, commit).claimed
    assert checkout.contradiction(tree, commit) == checkout.contradiction(tree, None) == ""
    assert commit in checkout.contradiction(tree, "f" * 40)


def test_a_copy_inside_another_repository_is_not_that_repository(tree):
    """A copy below somebody's repository does not get that repository's commit."""
    inner = tree / "copy"
    inner.mkdir()
    assert checkout.source(inner).commit is None


def test_a_repository_without_commits_has_none(tmp_path):
    """A copy with an empty repository is judged as one without git."""
    git(tmp_path, "init", "-q")
    assert checkout.source(tmp_path).commit is None


def overlooked(tree, how):
    """An edit of a committed file, or a new file, that a plain ``git status`` does not tell of."""
    code = tree / "gefen_offload" / "a.py"
    if how in ("skip-worktree", "assume-unchanged"):
        git(tree, "update-index", f"--{how}", "gefen_offload/a.py")
        code.write_text("a = 3\n")
        return " M gefen_offload/a.py"
    if how == "same-size":  # the file system's times say nothing either
        git(tree, "config", "core.trustctime", "false")
        os.utime(code, (1, 1))
        git(tree, "update-index", "--refresh")
        code.write_text("a = 3\n")
        os.utime(code, (1, 1))
        return " M gefen_offload/a.py"
    name = {"build": "gefen_offload/build/lib/old.py", "sourceless": "tests/torch.pyc", "settings": "pytest.ini"}[how]
    (tree / ".git" / "info" / "exclude").write_text("build/\n*.pyc\npytest.ini\n")
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("")
    return f"!! {name}"


@pytest.mark.parametrize("how", ["skip-worktree", "assume-unchanged", "same-size", "build", "sourceless", "settings"])
def test_what_git_status_overlooks_is_dirt(tree, how):
    """Files that the index hides, and ignored ones among the judged, are not the commit's."""
    says = overlooked(tree, how)
    assert git(tree, "status", "--porcelain") == ""
    assert checkout.source(tree).dirty == (says,)


def test_ignored_files_elsewhere_and_caches_are_no_dirt(tree):
    """An environment, evidence and compiled files may stand beside and among the sources."""
    (tree / ".git" / "info" / "exclude").write_text(".venv/\n__pycache__/\n")
    for name in (".venv/x.py", "gefen_offload/__pycache__/a.pyc", "__pycache__/conftest.pyc"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text("")
    assert checkout.source(tree).dirty == ()
    (tree / ".git" / "info" / "exclude").write_text(".venv/\n")
    assert checkout.source(tree).dirty == ()


def test_line_ends_as_git_checks_them_out_are_no_dirt(tree):
    """A checkout with converted line ends is its commit."""
    git(tree, "config", "core.autocrlf", "true")
    (tree / "gefen_offload" / "a.py").unlink()
    git(tree, "checkout", "-q", "--", "gefen_offload")
    assert (tree / "gefen_offload" / "a.py").read_bytes() == b"a = 1\r\n"
    assert checkout.source(tree).dirty == ()


@pytest.mark.parametrize("fault", ["index", "objects"])
def test_a_tree_that_git_cannot_compare_is_not_clean(tree, fault):
    """A corrupt index or a missing object is said with git's own words, and the commit is still named."""
    if fault == "index":
        (tree / ".git" / "index").write_bytes(b"rubbish")
    else:
        blob = git(tree, "rev-parse", "HEAD^{tree}")
        (tree / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    found = checkout.source(tree)
    assert found.commit is not None
    assert len(found.dirty) == 1
    assert re.match("whether it is clean is unknown: git (status|read-tree) ended with 128: ", found.dirty[0])


def test_a_git_that_takes_too_long_is_no_clean_tree(tree, monkeypatch):
    """A status that does not come is not an empty one."""

    def slow(folder, *arguments, index=None):
        if arguments[0] == "status":
            raise checkout.GitError("git status: timed out after 60 seconds")
        return git(folder, *arguments)

    monkeypatch.setattr(checkout, "git", slow)
    assert checkout.source(tree).dirty == ("whether it is clean is unknown: git status: timed out after 60 seconds",)


def test_the_variables_of_a_git_hook_name_no_other_repository(tree, tmp_path_factory, monkeypatch):
    """GIT_DIR and GIT_INDEX_FILE of a hook's repository do not lend that one's commit to a copy without git."""
    copy = tmp_path_factory.mktemp("copy")
    monkeypatch.setenv("GIT_DIR", str(tree / ".git"))
    assert checkout.source(copy).commit is None
