"""What a rank settles before it imports anything."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headrace.comm.errors import HeadraceError
from headrace.ranks.seat import ROLE, SEATS, Seats, rank_of, spelled, take_seat

SHOW = "import os, sys; print(sys.argv[1:], os.environ.get('HEADRACE_ROLE'), 'torch' in sys.modules)"


def test_devices_of_the_node_are_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seats = Seats((0,), {}, {"ASCEND_RT_VISIBLE_DEVICES": {"node1": "0-3", "node2": "4-5,7"}})
    monkeypatch.setenv(SEATS, msgspec.json.encode(seats).decode())
    monkeypatch.setenv("SLURMD_NODENAME", "node2")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    take_seat()
    assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "4,5,7"
    assert SEATS not in os.environ
    assert spelled("0") == "0"


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"PMI_RANK": "3", "SLURM_PROCID": "1"}, 3),
        ({"PMIX_RANK": "4", "SLURM_PROCID": "4"}, 4),
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, 2),
    ],
)
def test_the_mpi_knows_the_rank_better_than_slurm(environ: dict[str, str], rank: int) -> None:
    assert rank_of(environ) == rank


def test_a_process_without_a_number_is_refused() -> None:
    with pytest.raises(HeadraceError, match="which rank this process is"):
        rank_of({})


@pytest.mark.parametrize(("rank", "role"), [(0, "trainer"), (1, "generator")])
def test_every_role_goes_on_in_its_own_python(tmp_path: Path, rank: int, role: str) -> None:
    pythons = {}
    for name in ("trainer", "generator"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -c "{SHOW}" {name} "$@"\n')
        program.chmod(0o755)
        pythons[name] = str(program)
    seats = msgspec.json.encode(Seats((0,), pythons, {})).decode()
    environ = {**os.environ, SEATS: seats, "PMI_RANK": str(rank)}
    environ.pop(ROLE, None)
    command = [sys.executable, "-m", "headrace.ranks", "job.yaml", "--ranks", "2"]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said == f"['{role}', 'job.yaml', '--ranks', '2'] {role} False\n"
