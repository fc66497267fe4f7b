"""The sample exchange alone: rank 0 makes samples, rank 1 scores them, rank 2 trains on them.

mpirun -n 3 python -m mpi4py examples/exchange.py
"""

import numpy as np
from mpi4py import MPI

from headrace.comm.sample_exchange import Exchange, Schema, fixed, ragged

SCHEMA = Schema(
    {
        "tokens": ragged(np.int32),  # [*]: as many as the sample has
        "reward": fixed(np.float32),  # one number
        "hidden": ragged("bfloat16", (4,)),  # [*, 4], as the bits of bfloat16 numbers
        "pixels": fixed(np.uint8, (32, 32, 3), optional=True),  # some samples have no picture
    }
)
GROUPS, OWNER = 6, 0


def sample(length: int) -> dict[str, object]:
    hidden = np.full((length, 4), 0x3F80, np.uint16)  # 1.0; of a torch tensor: tensor.view(torch.uint16).numpy()
    pixels = np.zeros((32, 32, 3), np.uint8) if length % 2 else None
    return {"tokens": np.arange(length, dtype=np.int32), "reward": 0.5, "hidden": hidden, "pixels": pixels}


def make(exchange: Exchange) -> None:
    for key in range(GROUPS):
        exchange.put(key, [sample(key), sample(key + 1)])  # a group of two samples


def score(exchange: Exchange) -> None:
    seen = 0
    while seen < GROUPS:  # tokens only: no picture travels to this rank
        for key, group in exchange.consume(OWNER, "scorer", count=2, fields=["tokens"], wait_s=10).items():
            print(f"scorer: group {key}, lengths {[len(tokens) for tokens in group['tokens']]}", flush=True)
            seen += 1


def train(exchange: Exchange) -> None:
    seen = 0
    while seen < GROUPS:  # everything, once the scorer has had it; then it may be forgotten
        groups = exchange.consume(OWNER, "trainer", count=4, after="scorer", wait_s=10)
        for key, group in groups.items():
            pictures = sum(row["pixels"] is not None for row in group)
            print(f"trainer: group {key}, {len(group)} samples, {pictures} with a picture", flush=True)
        exchange.release(OWNER, groups)
        seen += len(groups)


with Exchange(MPI.COMM_WORLD, SCHEMA, limit_s=60) as exchange:
    [make, score, train][exchange.rank](exchange)
