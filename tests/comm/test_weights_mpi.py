"""The `mpi` weight transport over the simulated network: one thread, a virtual clock, delays and faults."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.delta import Cheaper
from headrace.comm.errors import HeadraceError, WaitLimitError
from headrace.comm.messages import WeightsPart, WeightsPull, WeightsReady
from headrace.comm.simulated import Delay, SimulatedNetwork, SimulatedTransport, no_delay
from headrace.comm.transport import Received
from headrace.comm.weights import TensorSpec, Version, WeightTensor
from headrace.comm.weights_mpi import SNAPSHOTS, MpiPublisher
from headrace.comm.weights_pull import MpiSubscriber

LIMIT_S = 100.0
TICK_S = 0.01


class Pump:
    """Stands in for the publisher's condition variable: to wait is to let the world go on."""

    def __init__(self, world: World) -> None:
        self.waits = 0
        self._world = world
        self._lock: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], limit_s: float) -> bool:
        deadline = self._world.network.now + limit_s
        self.waits += not predicate()
        while not predicate() and self._world.network.now < deadline:
            self._world.step()
        return predicate()


class Chance(Cheaper):
    """Changes or all bytes, by chance."""

    def __init__(self, seed: int, changes: float) -> None:
        super().__init__()
        self._rng, self._changes = random.Random(seed), changes

    def choose(self) -> bool:
        return self._rng.random() < self._changes


class World:
    """Trainers are ranks 0 … T-1, generators follow; `specs[t]` is what trainer t sends. `changes`: in how many
    versions a trainer tells what has changed, which then is little; None: never, and all changes."""

    def __init__(
        self,
        specs: Sequence[Sequence[TensorSpec]],
        generators: int,
        bucket_bytes: int = 64,
        verify: bool = True,
        delay: Delay = no_delay,
        limit_s: float = LIMIT_S,
        changes: float | None = None,
    ) -> None:
        self.specs, self.changes = specs, changes
        self.trainers = list(range(len(specs)))
        self.generators = list(range(len(specs), len(specs) + generators))
        self.network = SimulatedNetwork(len(specs) + generators, delay=delay)
        self.transports = [self.network.transport(rank) for rank in range(self.network.size)]
        self.publishers = [
            MpiPublisher(
                self.transports[t],
                self.generators,
                bucket_bytes,
                verify,
                2 * limit_s,
                None if changes is None else Chance(t, changes),
            )
            for t in self.trainers
        ]
        self.pumps = [Pump(self) for _ in self.trainers]
        for publisher, pump in zip(self.publishers, self.pumps, strict=True):
            publisher._changed = pump  # type: ignore[assignment]
        self.subscribers = {
            g: MpiSubscriber(self.transports[g], self.trainers, verify, limit_s, changes is not None)
            for g in self.generators
        }
        self.stopped: set[int] = set()
        self.corrupt: Callable[[Received], None] = lambda received: None
        self.parts: list[WeightsPart] = []
        """All that have arrived."""

    def step(self) -> None:
        """One poll and one tick of every courier."""
        for rank, transport in enumerate(self.transports):
            if rank not in self.stopped:
                self._turn(rank, transport)
        self.network.advance(TICK_S)

    def _turn(self, rank: int, transport: SimulatedTransport) -> None:
        service = self.publishers[rank] if rank in self.trainers else self.subscribers[rank]
        for received in transport.poll():
            assert isinstance(received.message, service.handles)
            self.corrupt(received)
            if isinstance(received.message, WeightsPart):
                self.parts.append(received.message)
            service.receive(received, self.network.now)
        service.tick(self.network.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.step()

    def share(self, trainer: int, version: int) -> list[WeightTensor]:
        if self.changes is None:
            rng = np.random.default_rng([trainer, version])
            return [WeightTensor(s, rng.integers(0, 256, s.nbytes, np.uint8)) for s in self.specs[trainer]]
        data = self.share_of_whole_bytes(trainer)
        for each in range(1, version + 1):
            rng = np.random.default_rng([trainer, each])
            for tensor in data:
                tensor.data[rng.random(tensor.data.size) < 0.03] ^= 0x5A
        return data

    def share_of_whole_bytes(self, trainer: int) -> list[WeightTensor]:
        rng = np.random.default_rng(trainer)
        return [WeightTensor(s, rng.integers(0, 256, s.nbytes, np.uint8)) for s in self.specs[trainer]]

    def publish(self, version: int, trainers: Sequence[int] | None = None) -> None:
        for trainer in self.trainers if trainers is None else trainers:
            self.publishers[trainer].publish(version, self.share(trainer, version))

    def check(self, found: Version) -> None:
        expected = [tensor for trainer in self.trainers for tensor in self.share(trainer, found.version)]
        assert [tensor.spec for tensor in found.tensors] == [tensor.spec for tensor in expected]
        for got, sent in zip(found.tensors, expected, strict=True):
            np.testing.assert_array_equal(got.data, sent.data)


def simple(trainers: int = 1, nbytes: int = 1000) -> list[list[TensorSpec]]:
    return [
        [TensorSpec(f"{t}.big", "uint8", (nbytes,)), TensorSpec(f"{t}.odd", "bfloat16", (3, 1, 5))]
        for t in range(trainers)
    ]


@st.composite
def sets_of_tensors(draw: st.DrawFn) -> list[list[TensorSpec]]:
    dtypes = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int64"])
    shapes = st.one_of(
        st.sampled_from([(), (0,), (3, 0, 2), (1,), (257,)]), st.lists(st.integers(1, 9), max_size=3).map(tuple)
    )
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    return [[TensorSpec(f"{t}.{n}", draw(dtypes), draw(shapes)) for n in range(count)] for t, count in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(
    specs=sets_of_tensors(),
    generators=st.integers(1, 4),
    bucket_bytes=st.sampled_from([1, 7, 64, 100, 4096]).filter(lambda n: n > 1),
    verify=st.booleans(),
    slowness=st.floats(0, 0.3),
    seed=st.integers(0, 1 << 30),
    changes=st.sampled_from([None, 0.7, 1.0]),
)
def test_every_version_taken_is_whole_and_equal_bit_for_bit_and_never_goes_back(
    specs: list[list[TensorSpec]],
    generators: int,
    bucket_bytes: int,
    verify: bool,
    slowness: float,
    seed: int,
    changes: float | None,
) -> None:
    rng = random.Random(seed)
    pace = [rng.random() * slowness for _ in range(len(specs) + generators)]
    world = World(
        specs,
        generators,
        bucket_bytes,
        verify,
        delay=lambda a, b, r: r.uniform(0, pace[a] + pace[b]),
        limit_s=1e4,
        changes=changes,
    )
    taken = dict.fromkeys(world.generators, -1)
    held: dict[int, Version] = {}
    last = 6
    for version in range(last + 1):
        for trainer in rng.sample(world.trainers, len(world.trainers)):
            world.publish(version, [trainer])
            world.run(rng.random() * 0.5)
        for generator in world.generators:
            if generator in held:
                world.check(held[generator])
                held.pop(generator).release()
            waiting = world.subscribers[generator].waiting
            found = world.subscribers[generator].take()
            assert waiting == (found is not None)
            assert not world.subscribers[generator].waiting
            if found is not None:
                assert taken[generator] < found.version <= version
                taken[generator] = found.version
                held[generator] = found
    for found in held.values():
        found.release()
    world.run(2 * TICK_S)
    while world.network.next_event_time() is not None:
        world.step()
    for generator in world.generators:
        found = world.subscribers[generator].take()
        assert (found.version if found else taken[generator]) == last
        if found:
            world.check(found)
        assert world.subscribers[generator].take() is None


def test_a_stuck_generator_keeps_neither_the_trainer_nor_the_others() -> None:
    world = World(simple(), generators=2)
    stuck, other = world.generators
    world.publish(0)
    world.run(0.05)
    world.stopped.add(stuck)
    for version in range(1, 10):
        world.publish(version)
        world.run(2)
        found = world.subscribers[other].take()
        assert found is not None
        assert found.version == version
        found.release()
    assert world.pumps[0].waits == 0
    assert len(world.publishers[0]._snapshots) <= SNAPSHOTS


def take(world: World, generator: int, version: int) -> None:
    """The generator takes the version in, and is right to."""
    world.run(2)
    found = world.subscribers[generator].take()
    assert found is not None
    assert found.version == version
    world.check(found)
    found.release()


def test_only_what_has_changed_travels_where_the_generator_has_the_version_before() -> None:
    world = World(simple(nbytes=6400), generators=2, bucket_bytes=640, changes=1.0)
    steady, skips = world.generators
    for version in range(4):
        world.publish(version)
        take(world, steady, version)
        told = [part.base for part in world.parts if part.version == version and part.base >= 0]
        assert (len(told) > 0) == (version > 0)
        assert set(told) <= {version - 1}
    world.stopped.add(skips)
    for version in (4, 5, 6):
        world.publish(version)
        take(world, steady, version)
    world.stopped.clear()
    world.parts.clear()
    take(world, skips, 6)
    assert {part.base for part in world.parts if part.version == 6} == {-1}, "what it has is gone"
    world.publish(7)
    take(world, skips, 7)
    assert 6 in {part.base for part in world.parts if part.version == 7}


def test_a_pull_that_was_given_up_leaves_a_mixture_that_nothing_is_compared_with() -> None:
    world = World(simple(2, nbytes=6400), generators=1, bucket_bytes=640, changes=1.0)
    (generator,) = world.generators
    for version in (0, 1):
        world.publish(version)
        take(world, generator, version)
    staging = world.subscribers[generator]._staging
    assert max(each.holds for each in staging) == 1
    world.publish(2)
    world.step()
    world.step()
    for publisher in world.publishers:  # as if they had gone on to other versions
        next(s for s in publisher._snapshots if s.version == 2).version = 99
    world.run(1)
    assert world.subscribers[generator].take() is None
    assert {each.holds for each in staging} == {-1}


def test_what_is_sooner_done_is_chosen_and_the_other_tried_again_now_and_then() -> None:
    cheaper = Cheaper()
    assert cheaper.choose(), "what was never tried"
    cheaper.took(False, 1000, 1.0)
    cheaper.took(True, 1000, 2.0)
    chosen = [cheaper.choose() for _ in range(3 * Cheaper.RETRY)]
    assert 0 < sum(chosen) <= 4
    for _ in range(5):
        cheaper.took(True, 1000, 0.5)
    chosen = [cheaper.choose() for _ in range(3 * Cheaper.RETRY)]
    assert sum(chosen) >= len(chosen) - 4


def test_buckets_arrive_in_their_place_and_are_not_copied_again() -> None:
    world = World(simple(), generators=1)
    world.publish(0)
    arrived: list[Received] = []
    world.corrupt = arrived.append
    world.run(2)
    found = world.subscribers[1].take()
    assert found is not None
    buffers = [buffer for received in arrived for buffer in received.buffers]
    assert len(buffers) > 10
    assert all(any(np.shares_memory(buffer, tensor.data) for tensor in found.tensors) for buffer in buffers)


def test_snapshots_and_staging_buffers_are_made_once() -> None:
    world = World(simple(), generators=1)
    subscriber = world.subscribers[1]
    addresses: list[set[int]] = []
    for version in range(12):
        world.publish(version)
        world.run(2)
        found = subscriber.take()
        assert found is not None
        found.release()
        addresses.append({s.slab._memory.ctypes.data for s in world.publishers[0]._snapshots})
        addresses[-1] |= {s.incoming[0].slab._memory.ctypes.data for s in subscriber._staging}
    assert addresses[4] == addresses[-1]
    assert len(world.publishers[0]._snapshots) == 2


def test_when_all_snapshots_are_pinned_the_wait_is_limited_and_names_the_generators() -> None:
    world = World(simple(), generators=2, limit_s=3.0)
    world.publish(0)
    world.run(0.05)
    world.stopped.add(1)
    world.run(1)
    world.publish(1)
    world.run(0.05)
    world.stopped.add(2)
    world.publish(2)
    with pytest.raises(WaitLimitError, match=r"version 3.*rank 1 \(version 0,.*rank 2 \(version 1,"):
        world.publish(3)
    assert world.pumps[0].waits == 1


def test_a_wait_for_a_snapshot_ends_when_a_generator_has_the_rest() -> None:
    world = World(simple(), generators=2)
    for generator, version in ((1, 0), (2, 1)):
        world.publish(version)
        world.run(0.05)
        world.network.silence(generator, until=20.0)
        world.run(1)
    world.publish(2)
    world.publish(3)
    assert world.pumps[0].waits == 1
    assert 20.0 < world.network.now < 21.0


def test_a_version_that_was_replaced_meanwhile_is_skipped() -> None:
    delays = {(1, 0): 10.0}
    world = World(simple(), generators=1, delay=lambda a, b, rng: delays.get((a, b), 0.0))
    world.publish(0)
    world.run(0.05)
    for version in (1, 2, 3):
        world.publish(version)
        world.run(0.05)
    delays.clear()
    world.run(15)
    found = world.subscribers[1].take()
    assert found is not None
    assert found.version == 3
    world.check(found)


def test_one_trainer_that_no_longer_has_the_version_doesnt_pin_it_at_the_others() -> None:
    world = World(simple(2), generators=1, delay=lambda a, b, rng: 10.0 if (a, b) == (2, 0) else 0.0)
    world.publish(0)
    world.run(0.05)
    for version in (1, 2):
        world.publish(version, [0])
    world.run(12)
    assert world.subscribers[2].take() is None
    assert all(not s.pulled_by for publisher in world.publishers for s in publisher._snapshots)
    world.publish(2, [1])
    world.run(150)
    found = world.subscribers[2].take()
    assert found is not None
    assert found.version == 2
    world.check(found)


def test_a_damaged_tensor_is_named_with_its_sender_and_not_handed_over() -> None:
    world = World(simple(2), generators=1)
    world.publish(0)
    world.run(1)

    def corrupt(received: Received) -> None:
        part = received.message
        if isinstance(part, WeightsPart) and (received.source, part.version, part.bucket) == (1, 1, 3):
            received.buffers[0][5] ^= 4

    world.corrupt = corrupt
    world.publish(1)
    with pytest.raises(HeadraceError, match=r"Version 1 .*tensor '1.big' from trainer rank 1 arrived damaged"):
        world.run(1)
    found = world.subscribers[2].take()
    assert found is not None
    assert found.version == 0
    world.check(found)


def test_a_trainer_that_dies_in_the_middle_is_named_and_the_old_version_stays() -> None:
    world = World(simple(3), generators=1, limit_s=5.0)
    world.publish(0)
    world.run(1)
    world.publish(1)
    world.run(0.05)
    world.network.kill(1)
    world.stopped.add(1)
    with pytest.raises(WaitLimitError, match=r"rank 3 .* version 1 .* rank 1 \(last announced version 1, sent \d+ of"):
        world.run(10)
    assert world.network.now < 7.0
    found = world.subscribers[3].take()
    assert found is not None
    assert found.version == 0
    world.check(found)
    assert world.subscribers[3].take() is None


def test_a_trainer_that_never_announces_is_named() -> None:
    world = World(simple(2), generators=1, limit_s=5.0)
    world.publish(0)
    world.run(20)
    world.publish(1, [0])
    with pytest.raises(WaitLimitError, match=r"announcement of version 1 .* rank 1 \(last announced version 0\)"):
        world.run(10)
    assert 24.0 < world.network.now < 26.0


def test_trainers_that_take_turns_in_being_ahead_are_not_stuck() -> None:
    world = World(simple(2), generators=1, limit_s=5.0)
    world.publish(0, [0])
    for version in range(1, 8):
        world.publish(version, [0])
        world.run(2)
        world.publish(version - 1, [1])
        world.run(2)
    found = world.subscribers[2].take()
    assert found is not None
    assert found.version == 6


def test_a_generator_asks_for_no_more_than_its_window() -> None:
    world = World(simple(nbytes=64 * 50), generators=1, delay=lambda a, b, rng: 1.0)
    world.publish(0)
    most = 0
    for _ in range(6000):
        world.step()
        incoming = world.subscribers[1]._staging[0].incoming[0]
        most = max(most, incoming.asked - incoming.arrived)
    assert world.subscribers[1].take() is not None
    assert most == 2


def test_versions_must_rise() -> None:
    world = World(simple(), generators=1)
    world.publish(3)
    with pytest.raises(ValueError, match="version 3 published after version 3"):
        world.publish(3)


def test_a_dead_generator_holds_no_snapshot_and_is_sent_nothing() -> None:
    world = World(simple(1), generators=2)
    publisher, dead = world.publishers[0], world.generators[0]
    for version in range(SNAPSHOTS):
        publisher.publish(version, world.share(0, version))
        pull = WeightsPull(version, 0)
        publisher.receive(Received(dead, pull), 0.0)
    assert not publisher._has_room(), "it pins every snapshot"
    publisher.drop(dead)
    assert publisher._has_room()
    world.network.transport(dead).poll()  # what it has been sent by now
    publisher.tick(0.0)
    assert world.transports[dead].poll() == []
    assert [r.message for r in world.transports[world.generators[1]].poll()] == [WeightsReady(SNAPSHOTS - 1, False)]


def test_publisher_and_subscriber_survive_real_threads() -> None:
    specs = simple(2, nbytes=20_000)
    network = SimulatedNetwork(4)
    world = World(specs, generators=2)
    publishers = [MpiPublisher(network.transport(t), [2, 3], 1024, True, 30.0) for t in (0, 1)]
    subscribers = [MpiSubscriber(network.transport(g), [0, 1], True, 30.0) for g in (2, 3)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def courier(service: MpiPublisher | MpiSubscriber) -> None:
        try:
            while not stop.is_set():
                for received in service._transport.poll():
                    service.receive(received, time.monotonic())
                service.tick(time.monotonic())
                time.sleep(1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=courier, args=(service,)) for service in (*publishers, *subscribers)]
    for thread in threads:
        thread.start()
    taken = [-1, -1]
    version, last, deadline = 0, 40, time.monotonic() + 60
    while min(taken) < last and time.monotonic() < deadline and not errors:
        if version <= last:
            for trainer, publisher in enumerate(publishers):
                publisher.publish(version, world.share(trainer, version))
            version += 1
        for n, subscriber in enumerate(subscribers):
            if (found := subscriber.take()) is not None:
                assert found.version > taken[n]
                world.check(found)
                taken[n] = found.version
                found.release()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert taken == [last, last]


def test_the_announcement_isnt_a_meeting() -> None:
    world = World(simple(), generators=1)
    heard: list[object] = []
    world.corrupt = lambda received: heard.append(received.message)
    world.publish(0)
    world.run(0.05)
    assert heard[0] == WeightsReady(0, meet=False)
