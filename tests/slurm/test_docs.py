"""docs/slurm.md, line by line: every command and every profile in it works on the cluster."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml
from cluster import Cluster
from jobs import latency_config
from runs import HEADRACE, RANKS, ROOT, job_in, shell

from headrace.launcher.profile import Profile

PAGE = (ROOT / "docs/slurm.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def folder_with_config(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "my-config.yaml").write_text(yaml.safe_dump(latency_config(ranks=RANKS, run={"steps": 5})))
    (folder / "sbatch").symlink_to(ROOT / "sbatch")
    return folder


def test_every_command_of_the_page_works(cluster: Cluster, tmp_path: Path) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    assert len(lines) == 3, "a new command needs a look at this test"
    dry, send, plain = lines
    folder = folder_with_config(tmp_path / "submitted")
    script = shell(cluster, folder, dry)
    assert not (folder / "runs").exists()
    job = job_in(shell(cluster, folder, send))
    assert (folder / "runs/job/job.sbatch").read_text() == script
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED"
    other = folder_with_config(tmp_path / "plain")
    line = plain.replace("sbatch ", "sbatch --nodes=4 --ntasks-per-node=2 ", 1)
    sent = shell(cluster, other, line, HEADRACE=HEADRACE)
    assert cluster.until_state(sent.split()[-1], "COMPLETED", "FAILED") == "COMPLETED"


def test_an_interactive_allocation_starts_the_ranks_on_its_nodes(cluster: Cluster, tmp_path: Path) -> None:
    (command,) = re.findall(r"`(headrace run my-config\.yaml launch\.starter=srun)`", PAGE)
    folder = folder_with_config(tmp_path / "shell")
    said = shell(cluster, folder, f"salloc --nodes=4 --ntasks-per-node=2 {command}")
    assert "on 4 nodes of job" in said
    assert "step 5/5" in said


def test_the_profile_of_the_page_is_whole_and_loads(cluster: Cluster, tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    assert set(yaml.safe_load(text)) == set(Profile.model_fields)
    folder = folder_with_config(tmp_path / "site")
    (folder / "site.yaml").write_text(text)
    job = job_in(shell(cluster, folder, "headrace submit my-config.yaml --nodes 4 --profile site.yaml"))
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED"


def test_the_page_names_every_option_of_submit() -> None:
    help_text = subprocess.run([HEADRACE, "submit", "--help"], capture_output=True, text=True, check=True).stdout
    for option in set(re.findall(r"--[a-z][a-z-]+", help_text)) - {"--help", "--ranks"}:
        assert option in PAGE, option
