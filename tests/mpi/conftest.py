"""Lets the tests of this folder, and of others, `from launch import run_ranks`; those of benchmarks import these."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))
