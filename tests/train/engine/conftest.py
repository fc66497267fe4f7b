"""Fixtures for the tests of the training engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for engine_kit, which the ranks of test_fsdp import as well

from engine_kit import CONFIGS, LENGTHS, Folders, make_model, make_samples

from headrace.train.batch import TrainSample

torch.set_num_threads(1)  # threads that wait for each other on a busy machine cost more than they give


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model folder for every entry of CONFIGS."""
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in CONFIGS}


@pytest.fixture(scope="session")
def samples() -> list[TrainSample]:
    return make_samples(LENGTHS)
