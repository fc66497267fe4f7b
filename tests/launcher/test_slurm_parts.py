"""The parts of running under Slurm that need none: node lists, placement, srun's words, profiles, the job script."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import ConfigError
from headrace.launcher.allocation import expand, find_allocation, parse_devices, place, ranks_per_node
from headrace.launcher.config import LaunchConfig
from headrace.launcher.failure import first_failure
from headrace.launcher.mpi import MpiInstallation
from headrace.launcher.profile import SBATCH, Profile, load_profile
from headrace.launcher.run import exit_status
from headrace.launcher.runfolder import Attempt
from headrace.launcher.srun_output import Report, in_order, lost_a_node, reports, without_followers
from headrace.launcher.starter import srun_starter
from headrace.launcher.stop import Stopped, StopRequest
from headrace.launcher.submit import Wish, prepare, sbatch_environment


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("n[008-011],gpu2", ["n008", "n009", "n010", "n011", "gpu2"]),
        ("r[1-2]n[3-4]x,y", ["r1n3x", "r1n4x", "r2n3x", "r2n4x", "y"]),
    ],
)
def test_node_lists_are_expanded_as_slurm_means_them(text: str, nodes: list[str]) -> None:
    assert list(expand(text)) == nodes


@given(st.integers(1, 200), st.integers(1, 20))
def test_ranks_are_placed_evenly_and_in_order(ranks: int, nodes: int) -> None:
    counts = ranks_per_node(ranks, nodes)
    assert sum(counts) == ranks
    assert max(counts) - min(counts) <= 1
    assert len(counts) == min(ranks, nodes)
    where = place(ranks, [str(node) for node in range(nodes)])
    assert where == sorted(where, key=int)
    assert [where.count(node) for node in dict.fromkeys(where)] == counts


def test_devices_come_from_the_details_of_the_job() -> None:
    text = """JobId=25 JobName=job
   JOB_GRES=npu:910b:8,gpu:2
     Nodes=node[1-2] CPU_IDs=14-15 Mem=2 GRES=npu:910b:2(IDX:0-1),gpu:1(IDX:5)
     Nodes=node3 CPU_IDs=0-1 Mem=2 GRES=npu:910b:2(IDX:4,7),gpu:0(IDX:)
     Nodes=node4 CPU_IDs=0-1 Mem=2 GRES=npu:910b(CNT:2)
"""
    assert dict(parse_devices(text, "npu")) == {"node1": "0-1", "node2": "0-1", "node3": "4,7"}
    assert dict(parse_devices(text, "gpu")) == {"node1": "5", "node2": "5"}


def test_outside_a_job_srun_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"this isn't one .*headrace submit"):
        find_allocation({"SLURM_JOB_NODELIST": "node1"})


def test_srun_is_told_everything_since_it_takes_the_rest_from_whatever_job_there_is(tmp_path: Path) -> None:
    (tmp_path / "srun").touch(0o755)
    allocation = find_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"})
    launch = LaunchConfig(cpus_per_rank=6, srun_options=["--network=x"])
    mpi = MpiInstallation("openmpi", "openmpi", Path("prterun"), (), {})
    starter = srun_starter(mpi, allocation, allocation.nodes, launch, {"PATH": str(tmp_path)})
    assert starter.command(4, "name") == [
        *(str(tmp_path / "srun"), "--job-name=name", "--nodes=2", "--ntasks-per-node=2", "--distribution=block"),
        *("--nodelist=n1,n2", "--mpi=pmix", "--ntasks=4", "--cpus-per-task=6", "--mem=0", "--overlap", "--export=ALL"),
        *("--kill-on-bad-exit=1", "--wait=60", "--unbuffered", "--network=x"),
    ]
    uneven = starter.command(3, "name")
    assert {"--distribution=arbitrary", "--nodelist=n1,n1,n2", "--ntasks=3", "--cpus-per-task=6"} <= set(uneven)


def test_the_first_end_that_srun_reports_gives_ranks_and_status() -> None:
    output = [
        "srun: launch/slurm: _step_signal: Terminating StepId=11.0",
        "srun: error: node3: task 5: Killed",
        "srun: error: node2: tasks 2-3,7: Exited with exit code 14",
        "srun: error: node1: task 0: Segmentation fault (core dumped)",
        "srun: error: node1: task 1: Out Of Memory",
    ]
    told = list(reports(output))
    assert [(report.node, report.ranks, report.status) for report in told] == [
        ("node3", (5,), 137),
        ("node2", (2, 3, 7), 14),
        ("node1", (0,), 139),
        ("node1", (1,), 1),
    ]
    assert exit_status(14, output, told) == 137
    assert exit_status(0, output, told) == 0
    assert lost_a_node(["srun: error: Node failure on node3"])
    assert not lost_a_node(output)


def test_the_end_that_the_launcher_saw_first_counts_before_the_one_that_srun_tells_first(tmp_path: Path) -> None:
    output = ["srun: error: node1: tasks 0-1: Killed", "srun: error: node3: tasks 4-5: Segmentation fault"]
    followers = [Report("node4", (6,), 14)]
    assert without_followers([6, 5, 0, 4], followers) == [5, 0, 4]
    told = in_order(reports(output), [5, 0, 4])
    assert [report.node for report in told] == ["node3", "node1"]
    assert exit_status(137, output, told) == 139
    attempt = Attempt(tmp_path, 1)
    assert first_failure(attempt, 139, [5, 0, 4], told, output).cause.startswith(
        "Rank 5 (on node3) was ended by signal"
    )
    attempt.folder.mkdir()
    for name, text in (("error_000.txt", "Rank 3 is silent."), ("lost_000", "")):
        (attempt.folder / name).write_text(text)
    lost = first_failure(attempt, 1, [0, 5, 4], told, output)
    assert (lost.cause, lost.accident) == ("Rank 0 failed: Rank 3 is silent.", True)
    (attempt.folder / "error_000.txt").unlink()
    told = in_order(reports(output), [])
    assert first_failure(attempt, 137, [], told, output).cause.startswith("Rank 0 or 1 (on node1) was ended")


def test_who_died_first_without_a_word_counts_before_those_that_only_lost_it(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    attempt.folder.mkdir()
    for name, text in (("error_001.txt", "A broadcast failed."), ("lost_001", "")):
        (attempt.folder / name).write_text(text)
    found = first_failure(attempt, 1, [3, 1, 0], [], [])
    assert found.cause == "Rank 3 ended first, and left no error. Rank 1 lost it: A broadcast failed."
    assert (found.rank, found.accident) == (3, True)
    assert first_failure(attempt, 1, [1, 3, 0], [], []).cause == "Rank 1 failed: A broadcast failed."
    (attempt.folder / "lost_001").unlink()
    assert first_failure(attempt, 1, [3, 1, 0], [], []).cause == "Rank 1 failed: A broadcast failed."


@pytest.mark.parametrize(("code", "status"), [(9, 137), (11, 139), (1, 1), (75, 75)])
def test_over_hosts_the_status_is_the_one_that_mpich_names(code: int, status: int) -> None:
    assert exit_status(7, ["=   PID 8 RUNNING AT node3", f"=   EXIT CODE: {code}"]) == status


def test_a_signal_before_the_ranks_raises_and_later_ones_are_kept() -> None:
    with StopRequest() as stop:
        with pytest.raises(Stopped):
            os.kill(os.getpid(), signal.SIGUSR2)
        assert (stop.signum, stop.at_once) == (signal.SIGUSR2, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.at_once, "Slurm's SIGTERM after its warning isn't a second wish"
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.at_once


def test_shipped_profiles_load_and_ascend_has_a_long_connection_limit() -> None:
    names = sorted(file.stem for file in (SBATCH / "profiles").glob("*.yaml"))
    assert names == ["ascend", "cpu", "nvidia"]
    loaded = {name: load_profile(name) for name in names}
    ascend = loaded["ascend"]
    assert ascend.gres == "npu:8"
    assert int(ascend.environment["HCCL_CONNECT_TIMEOUT"]) >= 600
    assert int(ascend.environment["HCCL_EVENT_TIMEOUT"]) > int(ascend.environment["HCCL_EXEC_TIMEOUT"])


def test_an_unknown_profile_or_key_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Shipped ones: ascend, cpu, nvidia"):
        load_profile("nowhere")
    (tmp_path / "site.yaml").write_text("partitoin: long\n")
    with pytest.raises(ConfigError, match=r"unknown key `partitoin` \(did you mean `partition`\?\)"):
        load_profile(str(tmp_path / "site.yaml"))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "job"},
                "rollout": {"engine": "latency"},
                "ranks": {"generators": 6, "trainers": 2},
            }
        )
    )
    return file


def test_the_script_says_what_the_profile_says(config: Path) -> None:
    site = Profile(
        partition="long",
        account="physics",
        time="12:00:00",
        gres="gpu:4",
        devices_per_node=4,
        cpus_per_rank=6,
        modules=["gcc/13"],
        environment={"CACHE": "$HOME/x y"},
        interface="ib0",
        scratch="/local",
        options=["--qos=normal"],
    )
    submission = prepare(Wish(config, nodes=2, spare_nodes=1, after="77"), site)
    for line in (
        "#SBATCH --partition=long",
        "#SBATCH --account=physics",
        "#SBATCH --time=12:00:00",
        "#SBATCH --gres=gpu:4",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --signal=B:USR2@120",
        "#SBATCH --dependency=afterok:77",
        "#SBATCH --qos=normal",
        "module load gcc/13",
        'export CACHE="$HOME/x y"',
        'export NCCL_SOCKET_IFNAME="ib0"',
        'export TRITON_CACHE_DIR="/local/headrace-$USER/triton"',
        "run=runs/job",
    ):
        assert f"\n{line}\n" in submission.script
    (resolved,) = submission.configs
    assert (resolved.launch.starter, resolved.launch.nodes, resolved.launch.cpus_per_rank) == ("srun", 2, 6)
    assert resolved.launch.env == {"OMPI_MCA_btl_tcp_if_include": "ib0"}
    assert not (config.parent / "runs").exists(), "nothing is written before it is sent"


@pytest.mark.parametrize("name", ["cpu", "nvidia", "ascend"])
def test_the_scripts_of_shipped_profiles_are_bash_and_give_every_job_its_own_ports(config: Path, name: str) -> None:
    script = prepare(Wish(config, sweep=("run.seed=1,2",)), load_profile(name)).script
    exports = "\n".join(line for line in script.splitlines() if line.startswith("export "))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    ports = {}
    for job in ("17", "18"):
        shown = subprocess.run(
            ["bash", "-c", f"{exports}\necho $HCCL_IF_BASE_PORT"],
            env={"SLURM_JOB_ID": job, "USER": "u", "PATH": "/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        ports[job] = shown.stdout.strip()
    if name == "ascend":
        assert int(ports["18"]) - int(ports["17"]) == 16
        assert int(ports["18"]) < 60000


def test_more_ranks_than_devices_of_a_node_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="8 ranks on a node, but it has 4 devices"):
        prepare(Wish(config, nodes=1), Profile(devices_per_node=4))


def test_a_sweep_is_an_array_with_a_folder_per_value(config: Path) -> None:
    submission = prepare(Wish(config, sweep=("train.lr=1e-6,3e-6", "run.seed=1,2")), Profile())
    assert "#SBATCH --array=0-3" in submission.script
    assert "run=${runs[$SLURM_ARRAY_TASK_ID]}" in submission.script
    names = [config.run.name for config in submission.configs]
    assert names[0] == "job-train.lr-1e-6-run.seed-1"
    assert len(set(names)) == 4
    assert [config.train.lr for config in submission.configs] == [1e-6, 1e-6, 3e-6, 3e-6]
    assert submission.folder == Path("runs/job.sweep")


def test_a_container_goes_before_the_ranks_python(config: Path) -> None:
    inside = {"image": "/images/h.sif", "python": "/opt/bin/python", "mounts": ["/data:/data"]}
    apptainer = Profile.model_validate({"container": {"runtime": "apptainer", "options": ["--nv"], **inside}})
    launch = prepare(Wish(config), apptainer).configs[0].launch
    assert launch.wrap == ["apptainer", "exec", "--bind", "/data:/data", "--nv", "/images/h.sif"]
    assert launch.python == Path("/opt/bin/python")
    pyxis = Profile.model_validate({"container": {"runtime": "pyxis", **inside}})
    launch = prepare(Wish(config), pyxis).configs[0].launch
    assert launch.srun_options == ["--container-image=/images/h.sif", "--container-mounts=/data:/data"]


def test_sbatch_gets_nothing_of_another_job() -> None:
    stale = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "0", "MASTER_PORT": "1"}
    kept = {"SLURM_CONF": "/c", "SBATCH_ACCOUNT": "physics", "PATH": "/bin"}
    assert sbatch_environment(stale | kept) == kept
