"""scripts/release --check: what it refuses, in a small repository."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADER = "#define SKL_VERSION_MAJOR 1\n#define SKL_VERSION_MINOR 2\n#define SKL_VERSION_PATCH 3\n"
CHANGELOG = "## [Unreleased]\n\n## [1.2.3] - 2026-11-18\n\n- Everything.\n"
README = "<!-- table: readme -->\n| problem | commit |\n| --- | --- |\n| a | {} |\n| b | {} |\n<!-- end of table -->\n"


class Tree:
    def __init__(self, folder):
        self.folder = folder
        self.git("init", "--quiet")
        self.write("scripts/benchmark-tables", "#!/bin/sh\n").chmod(0o755)
        shutil.copy(ROOT / "scripts/release", folder / "scripts/release")
        self.write("include/streamkl.h", HEADER)
        self.write("CHANGELOG.md", CHANGELOG)
        self.write("README.md", "")
        self.commit()
        self.figures(self.head())

    def git(self, *arguments):
        command = ["git", "-C", self.folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def head(self):
        return self.git("rev-parse", "--short=7", "HEAD")

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")

    def figures(self, first, second=None):
        self.write("README.md", README.format(first, second or first))
        self.commit()

    def check(self):
        run = subprocess.run([self.folder / "scripts/release", "--check"], capture_output=True, text=True)
        return run.returncode, run.stdout + run.stderr


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def refused(tree, reason):
    status, text = tree.check()
    lines = text.splitlines()
    return status == 1 and len(lines) == 2 and reason in lines[1]


def test_a_tree_that_is_ready(tree):
    assert tree.check() == (0, "version 1.2.3 is ready\n")


def test_documents_may_change_after_the_figures(tree):
    tree.write("docs/page.md", "text")
    tree.commit()
    assert tree.check()[0] == 0


def test_a_dirty_tree(tree):
    tree.write("src/new.c", "")
    assert refused(tree, "not committed")


def test_figures_of_other_code(tree):
    tree.write("src/new.c", "")
    tree.commit()
    assert refused(tree, "whose code is not that of this commit")


def test_figures_of_two_commits(tree):
    tree.figures(tree.head(), tree.git("rev-parse", "--short=7", "HEAD~1"))
    assert refused(tree, "figures must be of one commit")


def test_figures_of_an_unknown_commit(tree):
    tree.figures("0123abc")
    assert refused(tree, "not in the history")


def test_no_figures(tree):
    tree.write("README.md", "")
    tree.commit()
    assert refused(tree, "figures must be of one commit")


def test_figures_of_one_commit_name_it_in_the_caption(tree):
    caption = "<!-- table: readme; x -->\n| problem |\n| --- |\n| a |\n\n*GPU; today,\ncommit {}. bf16.*\n<!-- end of table -->\n"
    tree.write("README.md", caption.format(tree.git("rev-parse", "--short=7", "HEAD~1")))
    tree.commit()
    assert tree.check() == (0, "version 1.2.3 is ready\n")


def test_a_changelog_without_the_version(tree):
    tree.write("CHANGELOG.md", CHANGELOG.replace("1.2.3", "1.2.2"))
    tree.commit()
    assert refused(tree, "no section '## [1.2.3] - DATE'")


def test_changes_that_have_no_version(tree):
    tree.write("CHANGELOG.md", CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- New.\n"))
    tree.commit()
    assert refused(tree, "under [Unreleased]")


def test_a_version_in_a_second_place(tree):
    tree.write("docs/page.md", "pip install streamkl-1.2.3")
    tree.commit()
    assert refused(tree, "also written in docs/page.md")


def test_a_version_that_is_tagged_already(tree):
    tree.git("tag", "v1.2.3", "HEAD~1")
    assert refused(tree, "tagged at another commit")


def test_tables_that_are_out_of_date(tree):
    tree.write("scripts/benchmark-tables", "#!/bin/sh\nexit 1\n")
    tree.commit()
    assert refused(tree, "run scripts/benchmark-tables")
