"""docs/ascend.md on the cluster, with made-up NPUs and a stand-in for torch-npu."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from jobs import latency_config
from runs import ROOT, job_in, output, profile, shell
from stand_in_npu import install, notes
from tiny import tiny_config

PAGE = (ROOT / "docs/ascend.md").read_text()
RANKS = {"generators": 3, "trainers": 1}
TORCH_LIMIT_S = 240
"""Of a job whose ranks all import torch."""


def block(language: str, word: str) -> str:
    (found,) = (text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if word in text)
    return str(found)


def user(cluster: Cluster, folder: Path, line: str, config: dict[str, Any], **environ: str) -> str:
    """Type a line on the login node, where torch-npu is installed, but no CANN."""
    (folder / "my-config.yaml").write_text(yaml.safe_dump(config))
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder / "npu"), *([found] if found else [])])
    return shell(cluster, folder, line, PYTHONPATH=path, NPU_NOTES=str(folder / "notes"), **environ)


def small() -> dict[str, Any]:
    return tiny_config(run={"steps": 2}, ranks=RANKS)


def test_torch_cant_be_imported_on_a_login_node_without_the_first_line(cluster: Cluster, tmp_path: Path) -> None:
    install(tmp_path)
    first = block("bash", "--profile ascend").splitlines()[0]
    python = f"{sys.executable} -c 'import torch'"
    with pytest.raises(AssertionError, match="libhccl"):
        user(cluster, tmp_path, python, small())
    user(cluster, tmp_path, f"{first}\n{python}", small())


def test_the_commands_start_ranks_that_see_their_npus_before_torch_is_imported(
    cluster: Cluster, tmp_path: Path
) -> None:
    install(tmp_path)
    said = user(cluster, tmp_path, block("bash", "--profile ascend"), small(), RANK_TABLE_FILE="/of/another/job")
    job = job_in(said)
    assert "#SBATCH --gres=npu:8\n" in said
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=TORCH_LIMIT_S) == "COMPLETED", output(tmp_path)
    ranks = [note["environ"] for note in notes(tmp_path)]
    assert len(ranks) == 4, output(tmp_path)
    base = str(17000 + int(job) % 900 * 16)
    for rank in ranks:
        assert rank["ASCEND_RT_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        assert rank["HCCL_IF_BASE_PORT"] == base
        assert int(rank["HCCL_CONNECT_TIMEOUT"]) >= 600
        assert 2100 > int(rank["HCCL_EVENT_TIMEOUT"]) > int(rank["HCCL_EXEC_TIMEOUT"])
        assert "RANK_TABLE_FILE" not in rank


def test_a_rank_sets_the_npu_of_its_index_within_its_host(cluster: Cluster, tmp_path: Path) -> None:
    """It can't go on from there: the stand-in computes nothing."""
    install(tmp_path)
    config = latency_config(ranks={"generators": 6, "trainers": 2}, weights={"transport": "collective"})
    line = "headrace submit my-config.yaml --nodes 4 --profile ascend launch.relaunches=0"
    autoload = block("bash", "--profile ascend").splitlines()[0]
    job = job_in(user(cluster, tmp_path, f"{autoload}\n{line}", config, NPUS="1"))
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=TORCH_LIMIT_S) == "FAILED"
    assert "HCCL" in output(tmp_path)
    taken = {(int(note["environ"]["PMIX_RANK"]), *note["devices"]) for note in notes(tmp_path)}
    assert taken == {(rank, rank % 2) for rank in range(8)}


def test_every_role_runs_in_the_python_of_the_recipe(cluster: Cluster, tmp_path: Path) -> None:
    install(tmp_path)
    config = small() | yaml.safe_load(block("yaml", "envs/trainer"))
    for role, python in config["launch"]["python"].items():
        program = tmp_path / python
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexport OF={role}\nexec {sys.executable} "$@"\n')
        program.chmod(0o755)
    site = " ".join(profile(tmp_path, gres="npu:2", visible={"npu": "ASCEND_RT_VISIBLE_DEVICES"}, interface="eth0"))
    autoload = block("bash", "--profile ascend").splitlines()[0]
    line = f"{autoload}\nheadrace submit my-config.yaml --nodes 4 {site}"
    job = job_in(user(cluster, tmp_path, line, config))
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=TORCH_LIMIT_S) == "COMPLETED", output(tmp_path)
    ranks = [note["environ"] for note in notes(tmp_path)]
    assert sorted(rank["OF"] for rank in ranks) == ["generator"] * 3 + ["trainer"]
    assert {rank["ASCEND_RT_VISIBLE_DEVICES"] for rank in ranks} == {"0,1"}
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include"):
        assert {rank[name] for rank in ranks} == {"eth0"}


WANTED = re.compile(r"^(?:\S*/)?pip install (.*)$", re.MULTILINE)


@pytest.mark.parametrize("line", WANTED.findall(PAGE))
def test_what_the_page_installs_has_wheels_for_aarch64(line: str, tmp_path: Path) -> None:
    """Asks the package index; nothing is downloaded."""
    python = "3.10" if "torch==2.7.1" in line else "3.11"
    platforms = [f"--platform={name}_aarch64" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    options = ["--dry-run", "--no-deps", "--only-binary=:all:", f"--target={tmp_path}", f"--python-version={python}"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *platforms, *line.split()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert said.returncode == 0, said.stderr


def test_the_environments_of_the_recipe_are_made_with_pythons_that_headrace_runs_in() -> None:
    versions = re.findall(r"^python3\.(\d+) -m venv (\S+)$", block("bash", "-m venv"), re.MULTILINE)
    (least,) = re.findall(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert {folder for _, folder in versions} == {"envs/trainer", "envs/generator"}
    assert all(int(minor) >= int(least) for minor, _ in versions)
