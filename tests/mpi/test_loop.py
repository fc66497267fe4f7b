"""The whole loop over real ranks, with the latency engine: the bound, the books, the ends of the data."""

from __future__ import annotations

import math

import pytest
from jobs import check_books, latency_config, run_job

SHAPES = [
    # max_staleness, generators, trainers, transport (node: mpi, with node_shared), mpi
    pytest.param(1, 1, 1, "mpi", "mpich", marks=pytest.mark.slow),
    (2, 6, 3, "mpi", "mpich"),
    pytest.param(4, 4, 2, "collective", "mpich", marks=pytest.mark.slow),
    (0.5, 3, 2, "node", "openmpi"),
    pytest.param(0, 2, 3, "mpi", "mpich", marks=pytest.mark.slow),
    (2, 2, 1, "collective", "openmpi"),
]


@pytest.mark.parametrize(("staleness", "generators", "trainers", "transport", "mpi"), SHAPES)
def test_no_token_is_older_than_the_bound_and_every_ticket_has_one_end(
    tmp_path, staleness, generators, trainers, transport, mpi
):
    config = latency_config(
        ranks={"generators": generators, "trainers": trainers},
        ledger={"max_staleness": staleness},
        weights={"verify": True} | ({"node_shared": True} if transport == "node" else {"transport": transport}),
    )
    metrics, _ = run_job(config, tmp_path, mpi=mpi)
    assert len(metrics) == 50
    check_books(metrics, math.ceil(staleness))
    assert metrics[-1]["tickets/trained"] == 50 * 4
    assert metrics[-1]["tickets/outstanding"] == 0
    if staleness >= 1:
        assert max(line["staleness/max"] for line in metrics) > 0, "nothing ran ahead"


@pytest.mark.parametrize("staleness", [0, 2])
def test_several_steps_per_publication_count_staleness_in_publications(tmp_path, staleness):
    config = latency_config(ledger={"max_staleness": staleness}, weights={"publish_every": 3})
    metrics, _ = run_job(config, tmp_path)
    check_books(metrics, math.ceil((1 + staleness) * 3) - 1)
    assert metrics[-1]["tickets/trained"] == 200


@pytest.mark.parametrize(("size", "epochs", "groups"), [(3, 1, 8), (10, 2, 4), (7, 3, 4)])
def test_the_data_end_with_a_short_last_batch_and_no_hang(tmp_path, size, epochs, groups):
    config = latency_config(
        ranks={"generators": 3, "trainers": 2},
        ledger={"groups_per_step": groups, "max_staleness": 2},
        data={"size": size, "epochs": epochs},
    )
    metrics, _ = run_job(config, tmp_path)
    check_books(metrics, 2)
    assert metrics[-1]["tickets/trained"] == metrics[-1]["tickets/issued"] == size * epochs
    assert len(metrics) == math.ceil(size * epochs / groups)
