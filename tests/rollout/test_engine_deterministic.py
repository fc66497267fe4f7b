"""`run.deterministic`: a sample's bits depend on the weights, its prompt, parameters and key, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.torch_engine import TorchEngine, load_torch_engine

from .engine_tools import Sample, collect, prompts, run

GROUP = 3


def engine_of(folder: Path, dtype: str = "float32", slots: int = 8) -> TorchEngine:
    cpu = torch.device("cpu")
    return load_torch_engine(folder, dtype, cpu, slots, deterministic=True, group_size=GROUP, max_context=48)


def grouped_requests() -> list[Request]:
    """Five groups of three samples."""
    batch = prompts(5, seed=6)
    params = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=40)
    return [
        Request((ticket, sample), batch[ticket], params, (11, ticket, sample))
        for ticket in range(5)
        for sample in range(GROUP)
    ]


def run_together(engine: TorchEngine, requests: list[Request], steps_between: int) -> dict[object, Sample]:
    """Add one request after another, some steps apart."""
    samples: dict[object, Sample] = {}
    for request in requests:
        engine.add(request)
        for _ in range(steps_between):
            collect(samples, engine.step())
    return run(engine, samples)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_company_order_of_arrival_or_instance(llama_folder: Path, dtype: str) -> None:
    requests = grouped_requests()
    reference = run_together(engine_of(llama_folder, dtype), requests, 0)
    assert len({tuple(sample.tokens) for sample in reference.values()}) == len(requests)
    order = np.random.default_rng(0).permutation(len(requests))
    used = engine_of(llama_folder, dtype)
    assert run_together(used, [requests[i] for i in order], 2) == reference
    assert run_together(used, requests[::-1], 1) == reference
    for request in requests[::4]:
        assert run_together(engine_of(llama_folder, dtype), [request], 0) == {request.id: reference[request.id]}


def test_requests_of_one_slot_wait_for_each_other(llama_folder: Path) -> None:
    engine = engine_of(llama_folder, slots=4)
    requests = [request for request in grouped_requests() if (request.key[1] * GROUP + request.key[2]) % 4 == 1]
    assert len(requests) >= 3
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.capacity().running == 1
    assert set(run(engine, {})) == {request.id for request in requests}
