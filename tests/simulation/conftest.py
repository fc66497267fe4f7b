"""Lets the tests of this folder `from worlds.world import World`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
