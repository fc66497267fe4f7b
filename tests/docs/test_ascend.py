"""docs/ascend.md says what the shipped profile says. Its commands are tried in tests/slurm."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

from headrace.launcher.profile import load_profile

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/ascend.md").read_text()


def test_the_page_shows_the_shipped_profile() -> None:
    assert f"```yaml\n{(ROOT / 'sbatch/profiles/ascend.yaml').read_text()}```" in PAGE


def test_the_page_explains_every_setting_of_hccl() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    for name in load_profile("ascend").environment:
        assert any(name in row for row in rows), name


def test_jobs_at_once_have_port_ranges_of_their_own_below_those_of_linux() -> None:
    value = load_profile("ascend").environment["HCCL_IF_BASE_PORT"]
    script = f'for SLURM_JOB_ID in $(seq 4711 5610); do echo "{value}"; done'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    bases = sorted(map(int, said.split()))
    assert len(bases) == 900
    assert all(second - first >= 16 for first, second in pairwise(bases))
    assert bases[0] >= 1024
    assert bases[-1] + 16 <= 32768


def test_the_readme_leads_to_the_page() -> None:
    assert re.search(r"\(docs/ascend\.md\)", (ROOT / "README.md").read_text())
