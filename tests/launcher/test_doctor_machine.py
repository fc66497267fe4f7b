"""What the doctor finds on a machine: software, environment, disks, Slurm. Each trouble is made up."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.comm.errors import HeadraceError
from headrace.launcher.config import Config, LaunchConfig, load, validate
from headrace.launcher.doctor import command, disk, inputs, machine, slurm
from headrace.launcher.mpi import MpiInstallation, choose_mpi
from headrace.launcher.profile import Profile

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/scratch tmpfs rw 0 0
mds@tcp:/fs /lustre lustre rw,flock 0 0
/dev/vdb /with\\040space xfs rw 0 0
"""


def installation(family: str) -> MpiInstallation:
    return choose_mpi("mpich" if family == "mpich" else "openmpi", {"PATH": ""})


def test_all_that_headrace_needs_is_here() -> None:
    found = machine.check_versions()
    assert found.level == "OK"
    assert "torch 2." in found.text


def test_a_package_that_is_missing_or_too_old_is_named_with_its_remedy() -> None:
    found = machine.check_versions(
        ["numpy>=1000", "no-such-package", "pip; python_version < '3'", "mpich; extra == 'x'"]
    )
    assert found.level == "FAIL"
    assert found.text.startswith("numpy is ")
    assert found.text.endswith("; no-such-package isn't installed")
    assert found.remedy == "Run: pip install 'numpy>=1000' Run: pip install 'no-such-package'"


def test_the_reason_for_an_mpi_is_told() -> None:
    assert "there is no mpirun of the site" in machine.check_mpi(installation("mpich"), "auto").text
    assert machine.check_mpi(installation("openmpi"), "openmpi").text.endswith("launch.mpi: openmpi")


def test_variables_of_other_launchers_are_told_unless_this_shell_is_in_a_job() -> None:
    assert machine.check_environment({"PATH": "/bin", "SLURM_CONF": "x"}).level == "OK"
    stale = machine.check_environment({"MASTER_ADDR": "old", "OMPI_COMM_WORLD_SIZE": "8"})
    assert (stale.level, stale.text) == ("WARN", "variables of other launchers: MASTER_ADDR, OMPI_COMM_WORLD_SIZE")
    assert "in job 7" in machine.check_environment({"SLURM_JOB_ID": "7"}).text


def test_a_host_name_that_does_not_resolve_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    found = machine.check_host_name()
    assert found.level == "WARN"
    assert "doesn't resolve (Name or service not known)" in found.text


def test_inputs_are_checked_as_a_run_checks_them(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("rollout: {engine: latency}\n")
    config = load(file)
    assert inputs.check_config(config, str(file)).text.endswith("2 generators, 1 trainers, engine latency")
    assert inputs.check_model(config).level == inputs.check_data(config).level == "OK"
    tree = {"model": {"path": str(tmp_path / "none")}, "data": {"environment": "reasoning_gym:chain_sum"}}
    with pytest.raises(HeadraceError, match="there is no folder"):
        inputs.check_model(validate(tree, "test"))


def test_a_config_that_cannot_be_read_is_found_not_raised_and_the_rest_is_examined() -> None:
    patient = command._admit(Path("nowhere.yaml"), (), Profile())
    assert [(found.check, found.level) for found in patient.findings] == [("config", "FAIL"), ("MPI", "OK")]
    assert "nowhere.yaml can't be read" in patient.findings[0].text
    assert patient.folder == Path("runs")


def test_without_slurm_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "has_srun", lambda: False)
    (found,) = command._check_world(command._admit(None, (), Profile()), None, 2).findings
    assert (found.level, found.text) == ("FAIL", "--nodes 2 needs Slurm, but there is no srun on PATH")


# Disks


def with_model(tmp_path: Path, size: int) -> Config:
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(size)
    tree = {"model": {"path": str(tmp_path)}, "data": {"environment": "reasoning_gym:chain_sum"}}
    return validate(tree, "test")


@pytest.mark.parametrize(("free", "level"), [(20 << 30, "FAIL"), (30 << 30, "WARN"), (70 << 30, "OK")])
def test_there_must_be_room_for_a_checkpoint_and_should_be_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    """3 GiB of bf16 weights: 21 GiB a checkpoint, three of them at times."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    found = disk.check_space(tmp_path / "runs" / "x", with_model(tmp_path, 3 << 30))
    assert found.level == level
    assert "63.0 GiB needed for 3 checkpoints" in found.text


def test_the_file_system_of_a_folder_that_is_not_there_yet_is_tried_and_left_clean(tmp_path: Path) -> None:
    assert disk.check_file_system(tmp_path / "runs" / "x").level == "OK"
    assert disk.check_locks(tmp_path / "runs").level == "OK"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_on_which_fsync_is_slow_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "SLOW_FSYNC_S", -1.0)
    assert disk.check_file_system(tmp_path).level == "WARN"


def test_a_rename_that_does_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: None)
    assert disk.check_file_system(tmp_path).level == "FAIL"


def test_a_file_system_without_locks_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    found = disk.check_locks(tmp_path)
    assert (found.level, "-o flock" in found.remedy) == ("FAIL", True)


def test_locks_that_hold_nobody_off_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert disk.check_locks(tmp_path).level == "FAIL"


def test_a_clock_apart_from_the_file_servers_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk.check_clock(tmp_path).level == "OK"
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 30)
    found = disk.check_clock(tmp_path)
    assert found.level == "WARN"
    assert 29 < float(found.text.split()[0]) < 31


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/x", "ext4"),
        ("/home/me/.triton", "nfs4"),
        ("/home/me/scratch/x", "tmpfs"),
        ("/homer", "ext4"),
        ("/with space/x", "xfs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(folder: str, kind: str) -> None:
    assert disk.file_system(Path(folder), MOUNTS) == kind


def test_caches_lie_where_their_variables_say() -> None:
    folders = disk.cache_folders({"HOME": "/home/me", "TRITON_CACHE_DIR": "/tmp/t"})
    assert Path("/tmp/t") in folders
    assert Path("/home/me/.cache/vllm") in folders


def test_caches_on_a_network_file_system_are_a_warning() -> None:
    assert disk.judge_caches({"/tmp/a": "ext4", "/dev/shm/b": "tmpfs"}).level == "OK"
    found = disk.judge_caches({"/tmp/a": "ext4", "/home/b": "nfs4", "/c": "fuse.beegfs"})
    assert found.level == "WARN"
    assert found.text.count("on a network file system") == 2


# Slurm


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for made-up commands, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def program(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    "body",
    [
        "printf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n\\tpmix\\nspecific versions available: pmix_v4\\n'",
        "for t in 'MPI types are...' none pmi2 pmix pmix_v4; do echo \"srun: $t\" >&2; done",
    ],
)
def test_the_types_of_srun_are_read_from_old_and_new_versions(programs: Path, body: str) -> None:
    program(programs, "srun", body)
    assert set(slurm.offered_types()) == {"none", "pmi2", "pmix", "pmix_v4"}


@pytest.mark.parametrize(
    ("family", "offered", "level", "told"),
    [
        ("openmpi", ["none", "pmi2", "pmix"], "OK", "srun --mpi=pmix"),
        ("mpich", ["none", "cray_shasta"], "OK", "srun --mpi=cray_shasta"),
        ("mpich", ["none", "pmi2", "pmix"], "WARN", "pmi2 cuts what its ranks tell each other"),
        ("openmpi", ["none", "pmi2"], "WARN", "needs pmix: each process would be a world of its own"),
        ("mpich", ["none", "pmix"], "WARN", "needs pmi2"),
    ],
)
def test_the_type_must_be_that_of_the_library(family: str, offered: list[str], level: str, told: str) -> None:
    found = slurm.check_pmi(installation(family), offered)
    assert (found.level, told in found.text) == (level, True)


@pytest.mark.parametrize(
    ("body", "level", "told"),
    [
        (
            "echo 'JobRequeue              = 1'; echo 'SLURM_VERSION           = 22.05.8'",
            "OK",
            "Slurm 22.05.8 requeues",
        ),
        ("echo 'JobRequeue              = 0'", "WARN", "doesn't requeue"),
        ("echo 'Unable to contact' >&2; exit 1", "WARN", "Slurm doesn't answer: Unable to contact."),
    ],
)
def test_whether_jobs_are_requeued_is_asked(programs: Path, body: str, level: str, told: str) -> None:
    program(programs, "scontrol", body)
    found = slurm.examine_slurm("requeue", slurm.check_requeue)
    assert (found.level, told in found.text) == (level, True)


def test_an_srun_that_names_no_type_is_a_warning_about_slurm(programs: Path) -> None:
    program(programs, "srun", "exit 1")
    found = slurm.examine_slurm("PMI", lambda: slurm.check_pmi(installation("mpich")))
    assert (found.level, found.text) == ("WARN", "`srun --mpi=list` names no type.")


def test_the_script_asks_for_what_profile_and_ranks_need_and_quotes_values(tmp_path: Path) -> None:
    launch = LaunchConfig(cpus_per_rank=8, srun_options=["--container-image=x"])
    start = slurm.start_line(installation("mpich"), launch, "pmi2", 5, ["python", "-m", "x"])
    assert start[:4] == ["srun", "--mpi=pmi2", "--ntasks=5", "--cpus-per-task=8"]
    profile = Profile(partition="p", gres="npu:8", cpus_per_rank=8, setup=["source set_env.sh"], options=["--qos=long"])
    script = slurm.job_script(start, 2, 5, tmp_path / "log", {"A": "it's"}, profile)
    for line in ("partition=p", "gres=npu:8", "cpus-per-task=8", "ntasks-per-node=3", "qos=long"):
        assert f"#SBATCH --{line}\n" in script
    assert script.endswith(
        "source set_env.sh\nexport A='it'\"'\"'s'\nexec srun --mpi=pmi2 --ntasks=5 --cpus-per-task=8 --mem=0 --overlap "
        "--export=ALL --kill-on-bad-exit=1 --wait=60 --unbuffered --container-image=x python -m x\n"
    )


def test_without_a_fitting_type_mpirun_starts_the_ranks_in_the_job() -> None:
    line = slurm.start_line(installation("openmpi"), LaunchConfig(), None, 5, ["x"])
    assert line[0].endswith("prterun")
    assert line[-3:] == ["-n", "5", "x"]


def test_a_refused_job_says_what_chooses_its_queue(programs: Path, tmp_path: Path) -> None:
    program(programs, "sbatch", "echo 'invalid partition' >&2; exit 1")
    with pytest.raises(HeadraceError, match=r"doesn't take the job: invalid partition\. A --profile names"):
        slurm.sbatch(tmp_path / "x.sh")
