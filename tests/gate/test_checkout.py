"""What identifies the source: commit, dirt, digest, and a copy without git."""

from __future__ import annotations

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


def test_a_copy_inside_another_repository_is_not_that_repository(tree):
    """A copy below somebody's repository does not get that repository's commit."""
    inner = tree / "copy"
    inner.mkdir()
    assert checkout.source(inner).commit is None


def test_a_repository_without_commits_has_none(tmp_path):
    """A copy with an empty repository is judged as one without git."""
    git(tmp_path, "init", "-q")
    assert checkout.source(tmp_path).commit is None
