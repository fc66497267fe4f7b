"""Memory that processes share: seen by all, written by one, and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.comm.shared_memory import Segment, SharedSlab, map_segment

OWNER = """
import dataclasses, json, sys
from headrace.comm.shared_memory import SharedSlab
slab = SharedSlab()
slab.room(300_000)[:] = 7
print(json.dumps(dataclasses.asdict(slab.segment)), flush=True)
sys.stdin.read()
"""

WRITER = """
import json, sys
from headrace.comm.shared_memory import Segment, map_segment
data = map_segment(Segment(**json.loads(sys.argv[1])))
print(data[5], flush=True)
data[5] = 1
"""


def start_owner() -> tuple[subprocess.Popen[str], Segment]:
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True)
    assert owner.stdout is not None
    return owner, Segment(**json.loads(owner.stdout.readline()))


def test_nothing_is_left_of_an_owner_that_is_killed_and_what_others_read_stays() -> None:
    before = set(os.listdir("/dev/shm"))
    owner, segment = start_owner()
    data = map_segment(segment)
    assert set(os.listdir("/dev/shm")) == before
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=30)
    assert data.size == segment.nbytes
    assert (data[:300_000] == 7).all()
    with pytest.raises(OSError, match="No such file"):
        map_segment(segment)
    descriptors = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert sum(segment.name in name for name in descriptors) == 1, "the mapping's own"
    del data
    assert segment.name not in Path("/proc/self/maps").read_text()


def test_who_writes_what_others_read_ends_itself_and_changes_nothing() -> None:
    owner, segment = start_owner()
    data = map_segment(segment)
    fields = json.dumps({name: getattr(segment, name) for name in segment.__slots__})
    writer = subprocess.run([sys.executable, "-c", WRITER, fields], capture_output=True, text=True, timeout=60)
    assert (writer.stdout, writer.returncode) == ("7\n", -signal.SIGSEGV)
    assert data[5] == 7
    owner.communicate("", timeout=30)


def test_torch_reads_it_without_a_copy() -> None:
    slab = SharedSlab()
    slab.room(64)[:] = np.arange(64)
    tensor = torch.from_numpy(map_segment(slab.segment)).view(torch.bfloat16)
    before = tensor[3].item()
    slab.room(64)[6:8] = 63
    assert tensor[3].item() != before


def test_a_slab_that_grows_is_another_segment_and_keeps_its_bytes() -> None:
    slab = SharedSlab()
    slab.room(100)[:] = 3
    first = slab.segment
    data = map_segment(first)
    slab.room(10_000)
    assert slab.segment != first
    assert (map_segment(slab.segment)[:100] == 3).all()
    assert (data == 3).all()


def test_a_slab_of_nothing_is_nothing() -> None:
    slab = SharedSlab()
    assert slab.room(0).size == 0
    assert map_segment(slab.segment).size == 0
