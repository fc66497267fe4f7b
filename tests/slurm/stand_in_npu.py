"""A stand-in for torch-npu, as a package that torch loads by itself, like the real one.

On hosts that aren't nodes of the cluster its import fails, as it does without CANN. On nodes it notes down what the
process has in its environment when torch is imported, and which devices it sets. It says that there are no NPUs, unless
NPUS=1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PACKAGE = """\
import json, os, socket, types
import torch

if not socket.gethostname().startswith("node"):
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")

notes = os.path.join(os.environ["NPU_NOTES"], f"{socket.gethostname()}-{os.getpid()}.json")
seen = {"environ": dict(os.environ), "devices": []}


def write():
    with open(notes, "w") as file:
        json.dump(seen, file)


def set_device(device):
    seen["devices"].append(device.index)
    write()


write()
npu = types.SimpleNamespace(
    is_available=lambda: os.environ.get("NPUS") == "1",
    set_device=set_device,
    manual_seed_all=lambda seed: None,
    _is_in_bad_fork=lambda: False,
)
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
"""
LOADED_BY_TORCH = "[torch.backends]\ntorch_npu = torch_npu:write\n"
METADATA = "Metadata-Version: 2.1\nName: torch-npu\nVersion: 0.0\n"


def install(folder: Path) -> str:
    """Returns the folder for PYTHONPATH."""
    package, about = folder / "npu/torch_npu", folder / "npu/torch_npu-0.0.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (folder / "notes").mkdir()
    (package / "__init__.py").write_text(PACKAGE)
    (about / "entry_points.txt").write_text(LOADED_BY_TORCH)
    (about / "METADATA").write_text(METADATA)
    return str(folder / "npu")


def notes(folder: Path) -> list[dict[str, Any]]:
    """What ranks have noted down; the launcher, which loads the data beforehand, isn't one."""
    found = [json.loads(file.read_text()) for file in sorted((folder / "notes").iterdir())]
    return [note for note in found if "PMIX_RANK" in note["environ"]]
