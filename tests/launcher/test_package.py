"""The built package: everything in it, and nothing at the top level that could hide a user's module."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("launcher", "ranks", "comm", "rollout", "train")
BUILD = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built from a copy, so that the repository stays clean."""
    copy = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "sbatch", copy / "sbatch")
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    (copy / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True, timeout=120)
    (wheel,) = (copy / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_every_module_of_all_five_packages(names: set[str]) -> None:
    modules = [file.relative_to(ROOT) for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(modules) > 50
    assert {f"headrace/{module.as_posix()}" for module in modules} <= names
    assert {f"headrace/{package}/py.typed" for package in PACKAGES} <= names


def test_the_wheel_holds_the_job_scripts_and_profiles(names: set[str]) -> None:
    files = [file.relative_to(ROOT) for file in (ROOT / "sbatch").rglob("*") if file.is_file()]
    assert len(files) >= 5
    assert {f"headrace/{file.as_posix()}" for file in files} <= names


def test_the_wheel_puts_nothing_beside_headrace(names: set[str]) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names} == {"headrace"}
