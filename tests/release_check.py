"""Checks that a release needs beyond the tests, run by `make release-check` together with test_wheel.py.

pytest collects this file only by name, because a tree between releases fails it: its changelog has no version yet.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_wheel import PACKAGES, newer_python

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made of the sdist."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return out


def test_the_changelog_has_the_version() -> None:
    """A reader of the changelog finds the release, and nothing of it under Unreleased."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    unreleased, *releases = re.split(r"^## \[(?=\d)", changelog, flags=re.MULTILINE)
    assert releases, (
        f"CHANGELOG.md has no section: name it [{PROJECT['version']}] - date, above the lines of Unreleased"
    )
    assert releases[0].startswith(f"{PROJECT['version']}] - 20")
    assert not re.findall(r"^- ", unreleased, re.MULTILINE)


def test_a_commit_is_released_and_nothing_beside_it() -> None:
    """A file that git does not have would be in the wheel of one person only."""
    left = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert not left


def test_the_sdist_makes_the_same_wheel(built: Path) -> None:
    """A user who builds from source must get every module and every script."""
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {f"{PACKAGES[name.partition('/')[0]]}/{name}" for name in modules} <= names
    assert {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_a_newer_python_is_there_to_try() -> None:
    """test_wheel.py skips it otherwise, and a release must have been installed on two Pythons."""
    assert newer_python(), f"install a Python newer than {sys.version.split()[0]}"


def test_this_python_is_the_lowest_one() -> None:
    """The release promises the lowest one."""
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert f"{sys.version_info.major}.{sys.version_info.minor}" == lowest, f"run it with PYTHON=python{lowest}"


def test_the_sdist_installs_and_says_its_version(built: Path, tmp_path: Path) -> None:
    """The first thing anybody types."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, (sdist,) = tmp_path / "venv" / "bin" / "python", built.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", str(sdist)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    told = subprocess.run(
        [python.parent / "penstock", "--version"], check=True, capture_output=True, text=True, cwd=tmp_path
    ).stdout
    assert told.split()[-1] == PROJECT["version"]
