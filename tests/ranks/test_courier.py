"""The courier thread, the heartbeats and the first exchange, over the simulated network."""

from __future__ import annotations

import threading
import time

import pytest

from headrace.comm.courier import Courier
from headrace.comm.errors import HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.messages import Ask, Bye, Heartbeat, Hello, Silence
from headrace.comm.simulated import SimulatedNetwork
from headrace.ranks.config import RanksConfig
from headrace.ranks.heartbeat import LEAVING, Heartbeats, MainState
from headrace.ranks.living import Living
from headrace.ranks.startup import disagreement, meet
from headrace.ranks.topology import plan_roles


class Collector:
    handles = (Ask,)

    def __init__(self):
        self.got = []

    def receive(self, received, now):
        self.got.append((received.source, received.message.room))

    def tick(self, now):
        pass


def fail(error):
    raise AssertionError("the courier reported an error") from error


def test_messages_reach_the_service_of_their_type_and_commands_run_in_the_courier():
    network = SimulatedNetwork(2)
    collector = Collector()
    courier = Courier(network.transport(0), [collector], fail)
    courier.start()
    names = courier.call(lambda: threading.current_thread().name, 5)
    courier.call(lambda: courier.transport.send(0, Ask(3)), 5)
    courier.stop(5)
    assert names == "courier"
    assert collector.got == [(0, 3)]


def test_early_messages_come_first():
    network = SimulatedNetwork(1)
    transport = network.transport(0)
    transport.send(0, Ask(1))
    early = transport.poll()
    transport.send(0, Ask(2))
    collector = Collector()
    courier = Courier(transport, [collector], fail, early)
    courier.pump()
    assert collector.got == [(0, 1), (0, 2)]


def test_two_services_cannot_share_a_message():
    with pytest.raises(ValueError, match="Ask"):
        Courier(SimulatedNetwork(1).transport(0), [Collector(), Collector()], fail)


def test_an_exception_in_a_service_is_reported():
    errors = []
    courier = Courier(SimulatedNetwork(1).transport(0), [Collector()], errors.append)
    courier.start()
    courier.submit(lambda: courier.transport.send(0, Bye(1)))  # nobody handles it
    deadline = time.monotonic() + 5
    while not errors and time.monotonic() < deadline:
        time.sleep(0.01)
    assert isinstance(errors[0], KeyError)


def heartbeats(network, rank, roles, silence=5.0, limit=100.0, reissue=100.0, living=None):
    main = MainState("testing")
    beats = Heartbeats(
        network.transport(rank),
        roles,
        living or Living(roles),
        main,
        every_s=1.0,
        reissue_s=reissue,
        silence_s=silence,
        wait_limit_s=limit,
    )
    return beats, main


def tick_until(beats, begin, end):
    """As a courier does: often."""
    while begin < end:
        beats.tick(begin)
        begin += 0.1
    beats.tick(end)


def test_a_silent_rank_is_named_with_its_last_word():
    network = SimulatedNetwork(2)
    roles = plan_roles(["a", "b"], RanksConfig(trainers=1, generators=1))
    mine, _ = heartbeats(network, 0, roles)
    other, main = heartbeats(network, 1, roles)
    main.set("training step 7")
    now = time.monotonic()
    other.tick(now)
    mine.tick(now)
    for received in network.transport(0).poll():
        mine.receive(received, now)
    tick_until(mine, now, now + 4.9)
    with pytest.raises(PeerLostError, match=r"rank 1 \(generator 0 on b\) has been silent.*training step 7"):
        tick_until(mine, now + 4.9, now + 5.1)


def silences(network, rank, beats=None, now=0.0):
    """What a trainer is told of generators; what it is sent of heartbeats goes to `beats`."""
    got = network.transport(rank).poll()
    for received in got:
        if beats is not None and isinstance(received.message, Heartbeat):
            beats.receive(received, now)
    return [received.message for received in got if isinstance(received.message, Silence)]


def test_a_silent_generator_is_reported_to_all_trainers_and_again_when_it_is_heard():
    network = SimulatedNetwork(4)
    roles = plan_roles(["a"] * 4, RanksConfig(trainers=2, generators=2))
    watcher, _ = heartbeats(network, 3, roles, silence=60, reissue=5)
    silent, _ = heartbeats(network, 2, roles)
    now = time.monotonic()
    silent.tick(now)
    assert silences(network, 3, watcher, now) == []
    tick_until(watcher, now, now + 4.9)
    assert silences(network, 0) == silences(network, 1) == []
    tick_until(watcher, now + 4.9, now + 9)
    assert silences(network, 0) == silences(network, 1) == [Silence(2, over=False)], "once"
    silent.tick(now + 9)
    silences(network, 3, watcher, now + 9)
    assert silences(network, 0) == silences(network, 1) == [Silence(2, over=True)]
    tick_until(watcher, now + 9, now + 13)
    assert silences(network, 0) == []


def test_the_ring_closes_behind_a_dead_generator_and_old_reports_of_its_watch_are_taken_back():
    network = SimulatedNetwork(4)
    roles = plan_roles(["a"] * 4, RanksConfig(trainers=1, generators=3))
    living = Living(roles)
    living.under_way = True
    watcher, _ = heartbeats(network, 3, roles, silence=60, reissue=5, living=living)
    before, _ = heartbeats(network, 1, roles, living=living)
    now = time.monotonic()
    tick_until(watcher, now, now + 3)
    living.lose(2)
    network.transport(0).poll()
    before.tick(now + 3)
    assert silences(network, 3, watcher, now + 3) == []
    assert silences(network, 0) == [Silence(1, over=True)], "rank 2 may have taken it for lost"
    tick_until(watcher, now + 3, now + 7.9)
    assert silences(network, 0) == []
    tick_until(watcher, now + 7.9, now + 8.5)
    assert silences(network, 0) == [Silence(1, over=False)], "rank 1 is watched now"


def test_a_silent_trainer_is_never_presumed_lost_only_missed_in_the_end():
    network = SimulatedNetwork(2)
    roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
    watcher, _ = heartbeats(network, 1, roles, silence=20, reissue=5)
    now = time.monotonic()
    tick_until(watcher, now, now + 19)
    assert silences(network, 0) == []
    with pytest.raises(PeerLostError, match="rank 0"):
        tick_until(watcher, now + 19, now + 21)


def test_a_rank_that_stood_still_itself_takes_nobody_for_lost():
    network = SimulatedNetwork(2)
    roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
    mine, _ = heartbeats(network, 0, roles, reissue=3)
    now = time.monotonic()
    tick_until(mine, now, now + 2)
    tick_until(mine, now + 60, now + 60.5)
    assert silences(network, 0) == []
    tick_until(mine, now + 60.5, now + 62)
    assert silences(network, 0) == [Silence(1, over=False)]


def test_a_rank_that_leaves_is_not_missed():
    network = SimulatedNetwork(2)
    roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
    mine, _ = heartbeats(network, 0, roles)
    other, main = heartbeats(network, 1, roles)
    now = time.monotonic()
    other.tick(now)
    main.set(LEAVING)
    other.tick(now + 0.01)
    other.tick(now + 50)
    got = network.transport(0).poll()
    assert [received.message.state for received in got] == ["testing", LEAVING]
    for received in got:
        mine.receive(received, now)
    tick_until(mine, now, now + 150)


def test_a_main_thread_that_hangs_ends_the_job_and_leaves_the_stacks_of_all_threads(capfd):
    network = SimulatedNetwork(2)
    roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
    mine, main = heartbeats(network, 0, roles, silence=1e9, limit=10.0)
    main.set("engine step")
    with pytest.raises(WaitLimitError, match=r"rank 0 .*'engine step' for"):
        mine.tick(time.monotonic() + 21)
    assert "most recent call first" in capfd.readouterr().err


def meet_in_threads(network, facts, limit=5.0, absent=()):
    results = {}

    def one(rank):
        try:
            results[rank] = meet(network.transport(rank), Hello(f"host{rank}", facts(rank)), 3, 2, limit)
        except HeadraceError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(network.size) if rank not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_learn_all_hosts_and_the_step_to_start_from():
    results = meet_in_threads(SimulatedNetwork(4), lambda rank: {"data": "x"})
    for welcome, early in results.values():
        assert welcome.hosts == ["host0", "host1", "host2", "host3"]
        assert (welcome.start_step, welcome.launch) == (3, 2)
        assert not any(isinstance(received.message, Heartbeat) for received in early)


def test_ranks_that_see_other_data_are_named_on_every_rank():
    results = meet_in_threads(SimulatedNetwork(3), lambda rank: {"data": "old" if rank == 2 else "new"})
    for error in results.values():
        assert "'data': ranks [0, 1]: new; ranks [2]: old" in str(error)


def test_a_rank_that_never_arrives_is_named():
    results = meet_in_threads(SimulatedNetwork(3), lambda rank: {}, limit=0.3, absent=(1,))
    assert "Ranks [1] of 3 haven't arrived" in str(results[0])
    assert isinstance(results[2], WaitLimitError)


def test_equal_facts_are_no_disagreement():
    assert disagreement([Hello("x", {"a": "1"}), Hello("y", {"a": "1"})]) is None
