"""Runs a headrace job for a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

JOB_LIMIT_S = 600


def run_job(config: dict[str, Any], folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run a config to its end in `folder`; returns its metrics, one object per step."""
    config = config | {"run": config["run"] | {"dir": str(folder / "run")}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("headrace")), "run", str(path), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=JOB_LIMIT_S)
    if ended.returncode:
        raise SystemExit(f"the job ended with status {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def steps_per_s(metrics: list[dict[str, Any]], skip: int) -> float:
    """Of all steps but the first `skip`."""
    times = [line["time/step"] for line in metrics[skip:]]
    return len(times) / sum(times)
