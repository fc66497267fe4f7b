"""Groups that fail are logged, and end the run when nothing else happens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.comm.errors import DataError
from headrace.comm.messages import Failed, GeneratorCounters
from headrace.ranks.contribution import Phase
from headrace.ranks.failed_groups import FailedGroups, failure_limit
from headrace.ranks.tickets import LedgerSpec

ERROR = "ValueError: no verdict (reward.py, line 3)\nTraceback (most recent call last):\n  …"


class Node:
    """What FailedGroups sees of a ledger."""

    def __init__(self):
        self.failures = []
        self.counters = {}
        self.phase = Phase.FORMING
        self.totals = SimpleNamespace(issued=0, failed=0)

    def take_failures(self):
        failures, self.failures = self.failures, []
        return failures

    def fail(self, *tickets):
        self.failures += [Failed(ticket, 0, "reward_raised", ERROR) for ticket in tickets]

    def finish(self, generator, samples):
        self.counters[generator] = GeneratorCounters(0, samples, 0.0, 0.0, 0.0, 0)


def test_a_row_of_failures_ends_the_run_with_the_last_error_in_one_paragraph(capsys):
    node = Node()
    groups = FailedGroups(node, 3)
    node.fail(4, 5)
    groups.tick(0.0)
    node.fail(6)
    with pytest.raises(
        DataError, match=r"3 groups in a row.*ticket 6 failed.*no verdict \(reward\.py, line 3\)"
    ) as error:
        groups.tick(0.0)
    assert "\n" not in str(error.value)
    assert "Traceback" not in str(error.value)
    assert capsys.readouterr().err.count("Traceback") == 3


def test_a_reward_in_between_begins_a_new_row():
    node = Node()
    groups = FailedGroups(node, 3)
    for turn in range(1, 20):
        node.finish(turn % 2, 4 * turn)
        node.fail(2 * turn, 2 * turn + 1)
        groups.tick(0.0)
    assert groups.describe().startswith("; 38 groups have failed here, at last ticket 39 failed (reward_raised): Val")
    assert "\n" not in groups.describe()


def test_data_that_end_with_nothing_but_failures_end_the_run():
    node = Node()
    groups = FailedGroups(node, 10)
    node.fail(0, 1)
    groups.tick(0.0)
    node.phase, node.totals = Phase.OVER, SimpleNamespace(issued=2, failed=2)
    with pytest.raises(DataError, match="2 groups in a row"):
        groups.tick(0.0)


@pytest.mark.parametrize("failed", [0, 1])
def test_data_that_end_otherwise_end_well(failed):
    node = Node()
    groups = FailedGroups(node, 10)
    node.fail(*range(failed))
    node.phase, node.totals = Phase.OVER, SimpleNamespace(issued=failed + 1, failed=failed)
    groups.tick(0.0)
    assert bool(groups.describe()) == bool(failed)


@pytest.mark.parametrize(
    ("groups", "ledgers", "in_order", "limit"),
    [(4, 1, False, 8), (32, 1, False, 32), (32, 3, False, 11), (4, 1, True, 4), (5, 2, True, 3)],
)
def test_the_limit_is_a_ledgers_share_of_a_step(groups, ledgers, in_order, limit):
    spec = LedgerSpec(groups, 0.0, 1, 2, 10, in_order=in_order)
    assert failure_limit(spec, ledgers) == limit
