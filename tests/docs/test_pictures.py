"""Pictures in docs/ that a script draws can be drawn again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_timeline_of_the_ledger_is_drawn_from_a_simulated_run(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    subprocess.run([sys.executable, "docs/pictures/ledger_timeline.py", str(picture)], check=True, timeout=60)
    assert picture.read_bytes().startswith(b"\x89PNG")
