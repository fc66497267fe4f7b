"""The doctor over real ranks: by the commands that docs/doctor.md shows, and with ranks that go wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jobs import latency_config
from launch import LAUNCHERS, environment, run_ranks

BIN = Path(sys.executable).parent
EXAMPLES = re.findall(
    r"^(?:headrace|mpirun) .*?(?= +#|$)", (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(), re.MULTILINE
)
WORLD = (
    *("world", "hosts", "same software", "MPI threads", "CPUs", "devices", "shared memory", "open files", "host names"),
    *("caches", "run folder", "clocks", "interfaces", "rendezvous", "collective", "point-to-point", "broadcast"),
)
MACHINE = ("MPI", "versions", "environment", "host name", "free space", "file system", "locks", "clock")

SBATCH = '#!/bin/sh\necho "$2" > {folder}/script\nsh "$2" > {folder}/output 2>&1 &\necho 7\n'
SRUN = """\
#!/bin/sh
[ "$1" = --mpi=list ] && echo "MPI plugin types are... none cray_shasta" && exit
echo "$@" > {folder}/srun
while [ "${{1#--}}" != "$1" ]; do shift; done
exec {mpirun} -n 3 "$@"
"""
SQUEUE = "#!/bin/sh\necho '7|RUNNING|None|9:00'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config, and a Slurm that runs jobs on this machine: its commands come first on PATH."""
    (tmp_path / "my-config.yaml").write_text(yaml.safe_dump(latency_config(launch={"mpi": "mpich"})))
    fakes = {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scontrol": "#!/bin/sh\necho JobRequeue = 1\n"}
    for name, text in fakes.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text.format(folder=tmp_path, mpirun=LAUNCHERS["mpich"][0]))
        program.chmod(0o755)
    return tmp_path


def examined(folder: Path, *arguments: str, status: int = 0) -> str:
    """What `headrace doctor` prints."""
    path = f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [str(BIN / "headrace"), "doctor", *arguments]
    done = subprocess.run(
        command, cwd=folder, env={**kept, "PATH": path, "COLUMNS": "200"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def example(number: int) -> list[str]:
    return EXAMPLES[number].split()[2:]


def lines(table: str) -> dict[str, str]:
    """Level by check."""
    return dict(re.findall(r"^│ (\S[^│]*?) +│ (OK|WARN|FAIL) ", table, re.MULTILINE))


def test_this_machine_and_two_ranks_pass(folder: Path) -> None:
    assert len(EXAMPLES) == 5
    found = lines(examined(folder, *example(0)))
    assert set(found) == {*MACHINE, *WORLD, "requeue", "PMI"}
    assert "FAIL" not in found.values()


def test_the_report_for_machines_holds_findings_facts_and_measurements(folder: Path) -> None:
    assert example(3) == [*example(1), "--json"]
    report = json.loads(examined(folder, *example(3)))
    assert {finding["check"] for finding in report["findings"]} >= {"config", "model", "data", *MACHINE, *WORLD}
    assert len(report["facts"]) == 3
    assert len(report["pairs"]) == 6
    assert all(pair["gib_per_s"] > 0 for pair in report["pairs"])


def test_nodes_are_examined_in_a_job(folder: Path) -> None:
    found = lines(examined(folder, *example(2)))
    assert set(WORLD) <= set(found)
    assert "FAIL" not in found.values()
    assert "--mpi=cray_shasta --ntasks=3" in (folder / "srun").read_text()
    assert not list(folder.glob("**/.doctor-*")), "nothing stays"


def test_a_job_that_leaves_no_report_fails_with_its_last_words(folder: Path) -> None:
    (folder / "bin" / "sbatch").write_text(
        '#!/bin/sh\necho "no such module" > $(sed -n "s/#SBATCH --output=//p" $2)\necho 7\n'
    )
    (folder / "bin" / "squeue").write_text("#!/bin/sh\ntrue\n")
    table = examined(folder, *example(2), status=1)
    assert lines(table)["world"] == "FAIL"
    assert "job 7 ended and left no report" in table
    assert "no such module" in table


def test_ranks_that_cannot_start_are_a_finding(folder: Path) -> None:
    table = examined(folder, "my-config.yaml", "launch.python=/bin/false", status=1)
    assert lines(table)["world"] == "FAIL"
    assert "the ranks ended with status 1 and left no report" in table


def test_the_ranks_print_the_table_by_themselves(tmp_path: Path) -> None:
    mpirun, *arguments = EXAMPLES[4].split()
    assert (mpirun, arguments[2]) == ("mpirun", ".venv/bin/python")
    command = [*LAUNCHERS["openmpi"], *arguments[:2], sys.executable, *arguments[3:]]
    plain = {**environment("openmpi"), "NO_COLOR": "1", "TERM": "dumb"}  # Open MPI gives its ranks a terminal
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(lines(done.stdout)) == set(WORLD)


def test_a_world_of_one_is_refused_with_the_remedy() -> None:
    command = [*LAUNCHERS["mpich"], "-n", "2", sys.executable, "-m", "headrace.launcher.doctor", "--ranks", "2"]
    done = subprocess.run(command, env=environment("openmpi"), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert " ".join(re.findall(r"[\w`-]+", done.stdout)).count("each of them is a world of its own") == 2


def test_a_part_that_fails_is_told_by_all_ranks_and_they_go_on() -> None:
    ended = run_ranks("mpich", 3, "doctor_stages", "raises").check()
    assert ended.stdout.count("failed to look at the disk: ranks [1]: the disk is full") == 3


def test_a_rank_that_does_not_come_is_named() -> None:
    ended = run_ranks("mpich", 3, "doctor_stages", "sleeps", limit_s=25)
    assert ended.status == 3
    assert "rank 0: LostError: ranks [1] didn't look at the disk within 1 s" in ended.stdout
