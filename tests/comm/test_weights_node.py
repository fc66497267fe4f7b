"""`weights.node_shared` over the simulated network: one thread, a virtual clock, generators of several nodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.delta import Cheaper
from headrace.comm.errors import HeadraceError, WaitLimitError
from headrace.comm.simulated import Delay, SimulatedNetwork, no_delay
from headrace.comm.transport import Received
from headrace.comm.weights import TensorSpec, Version, WeightTensor
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_node import BUFFERS, NodeSubscriber, _describe
from headrace.comm.weights_pull import WINDOW

TICK_S = 0.01
LIMIT_S = 100.0


class Turns(Cheaper):
    """Changes and all bytes by turns."""

    def choose(self) -> bool:
        self._last = not self._last
        return self._last


class Onward(nullcontext[None]):
    """Stands in for the publisher's condition variable: to wait is to let the world go on."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def notify_all(self) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], limit_s: float) -> bool:
        deadline = self._world.network.now + limit_s
        while not predicate() and self._world.network.now < deadline:
            self._world.step()
        return predicate()


class World:
    """Trainers are ranks 0 … T-1; generators follow, so many on each of the nodes."""

    def __init__(
        self,
        nodes: Sequence[int],
        trainers: int = 1,
        nbytes: int = 1000,
        delay: Delay = no_delay,
        limit_s: float = LIMIT_S,
        verify: bool = True,
        delta: bool = False,
    ) -> None:
        self.specs = [
            [TensorSpec(f"{t}.big", "uint8", (nbytes,)), TensorSpec(f"{t}.odd", "bfloat16", (3, 1, 5))]
            for t in range(trainers)
        ]
        self.network = SimulatedNetwork(trainers + sum(nodes), delay=delay)
        self.transports = [self.network.transport(rank) for rank in range(self.network.size)]
        ends = [trainers + sum(nodes[:n]) for n in range(len(nodes) + 1)]
        self.nodes = [range(a, b) for a, b in pairwise(ends)]
        self.generators = list(range(trainers, self.network.size))
        firsts = [node[0] for node in self.nodes]
        self.publishers = [
            MpiPublisher(self.transports[t], firsts, 128, verify, LIMIT_S, Turns() if delta else None)
            for t in range(trainers)
        ]
        for publisher in self.publishers:
            publisher._changed = Onward(self)  # type: ignore[assignment]
        self.subscribers = {
            g: NodeSubscriber(self.transports[g], range(trainers), node, verify, limit_s, delta)
            for node in self.nodes
            for g in node
        }
        self.sent: dict[tuple[int, int], list[WeightTensor]] = {}
        self.held: dict[int, Version] = {}
        self.taken = dict.fromkeys(self.generators, -1)
        self.dead: set[int] = set()

    def step(self) -> None:
        """One poll and one tick of every courier; whatever is held must be as it was sent."""
        for rank, transport in enumerate(self.transports):
            if rank not in self.dead:
                service = self.subscribers[rank] if rank in self.subscribers else self.publishers[rank]
                for received in transport.poll():
                    service.receive(received, self.network.now)
                service.tick(self.network.now)
            for found in self.held.values():
                self.check(found)
        self.network.advance(TICK_S)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.step()

    def share(self, trainer: int, version: int) -> list[WeightTensor]:
        """Every version differs from the one before in some bytes."""
        if (trainer, version) not in self.sent:
            self.sent[trainer, version] = self._make_share(trainer, version)
        return self.sent[trainer, version]

    def _make_share(self, trainer: int, version: int) -> list[WeightTensor]:
        rng, own = np.random.default_rng(trainer), np.random.default_rng([trainer, version])
        tensors = [WeightTensor(s, rng.integers(0, 256, s.nbytes, np.uint8)) for s in self.specs[trainer]]
        for tensor in tensors:
            tensor.data[:: own.integers(1, 30)] += np.uint8(1 + version)
        return tensors

    def publish(self, version: int) -> None:
        for trainer, publisher in enumerate(self.publishers):
            publisher.publish(version, self.share(trainer, version))

    def check(self, found: Version) -> None:
        expected = [tensor for t in range(len(self.specs)) for tensor in self.share(t, found.version)]
        assert [tensor.spec for tensor in found.tensors] == [tensor.spec for tensor in expected]
        assert all(np.array_equal(got.data, sent.data) for got, sent in zip(found.tensors, expected, strict=True))

    def take(self, generator: int) -> Version | None:
        """Whole, as sent, and newer than all before; held until `release`."""
        assert generator not in self.held
        waiting = self.subscribers[generator].waiting
        found = self.subscribers[generator].take()
        assert waiting == (found is not None)
        if found is not None:
            self.check(found)
            assert found.version > self.taken[generator]
            self.taken[generator] = found.version
            self.held[generator] = found
        return found

    def release(self, generator: int) -> None:
        self.held.pop(generator).release()

    def take_all(self, version: int, *but: int) -> None:
        """All generators but some take this version in and release it."""
        for generator in set(self.generators) - {*but} - self.dead:
            found = self.take(generator)
            assert found is not None
            assert found.version == version
            self.release(generator)

    def buffers(self, generator: int) -> int:
        return len(self.subscribers[generator]._pull._staging)


def play(world: World, seed: int, versions: int) -> None:
    """Publish, take, release and let time pass, by chance; some generators are slow."""
    rng = random.Random(seed)
    pace = {generator: rng.random() for generator in world.generators}
    for version in range(versions):
        world.publish(version)
        for _ in range(rng.randrange(20)):
            generator = rng.choice(world.generators)
            if rng.random() < pace[generator]:
                if generator in world.held:
                    world.release(generator)
                else:
                    world.take(generator)
            world.run(rng.choice([0, TICK_S, 3 * TICK_S]))
    for generator in list(world.held):
        world.release(generator)
    world.run(20)
    for generator in world.generators:
        world.take(generator)
        assert world.taken[generator] == versions - 1
        assert world.buffers(generator) <= BUFFERS


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.sampled_from([[1], [3], [2, 1], [4]]),
    trainers=st.integers(1, 2),
    slowness=st.sampled_from([0.0, 0.02, 0.1]),
    delta=st.booleans(),
    verify=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_what_a_generator_holds_is_whole_and_stays_as_it_is_and_versions_rise(
    nodes: list[int], trainers: int, slowness: float, delta: bool, verify: bool, seed: int
) -> None:
    delay = lambda a, b, rng: rng.uniform(0, slowness)  # noqa: E731
    play(World(nodes, trainers, delay=delay, verify=verify, delta=delta), seed, versions=6)


def test_the_check_above_sees_a_buffer_that_is_filled_while_another_generator_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def at_the_first_return(self: NodeSubscriber, holder: int, version: int) -> None:
        loan = self._loans.pop(version, None)
        if loan is not None:
            loan.found.release()

    def play_some() -> None:
        for seed in range(40):
            play(World([3]), seed, versions=6)

    monkeypatch.setattr(NodeSubscriber, "_end_loan", at_the_first_return)
    with pytest.raises(AssertionError):
        play_some()


def test_all_of_a_node_read_the_same_memory_and_only_one_of_them_is_sent_it() -> None:
    world = World([3, 2])
    sent: list[int] = []
    for generator in world.generators:
        pull = world.subscribers[generator]._pull
        pull_receive = pull.receive
        pull.receive = lambda received, now, g=generator, f=pull_receive: (sent.append(g), f(received, now))  # type: ignore[method-assign,misc]
    world.publish(0)
    world.run(1)
    assert set(sent) == {1, 4}
    first, *others = [world.take(generator) for generator in world.nodes[0]]
    assert first is not None
    for found in others:
        assert found is not None
        assert found.tensors[0].data.flags.writeable, "torch would copy it"
        assert found.tensors[0].data.ctypes.data != first.tensors[0].data.ctypes.data, "a mapping of its own"
        first.tensors[0].data[5] ^= 255
        assert found.tensors[0].data[5] == first.tensors[0].data[5]
        first.tensors[0].data[5] ^= 255


def test_the_others_are_told_when_a_version_is_on_its_way_and_a_moment_before_it_is_whole() -> None:
    world = World([2], trainers=2, nbytes=128 * 50)
    first, other = world.nodes[0]
    heard: list[str] = []
    receive = world.subscribers[other].receive
    left: list[int] = []

    def listen(received: Received, now: float) -> None:
        heard.append(type(received.message).__name__)
        filling = world.subscribers[first]._pull._filling
        left.append(sum(s.buckets - s.arrived for s in filling.incoming.values()) if filling else 0)
        receive(received, now)

    world.subscribers[other].receive = listen  # type: ignore[method-assign]
    for version in range(3):
        world.publish(version)
        world.run(5)
        world.take_all(version)
    assert heard == ["NodeSoon", "NodeSoon", "NodeVersion"] * 3
    assert all(0 < buckets <= 2 * WINDOW for buckets in left[1::3])


def test_two_buffers_do_where_nobody_is_slow_and_memory_stays_the_same() -> None:
    world = World([3])
    first = world.nodes[0][0]
    segments: set[object] = set()
    for version in range(12):
        world.publish(version)
        world.run(1)
        world.take_all(version)
        world.run(0.1)
        shares = [s.incoming[0].slab for s in world.subscribers[first]._pull._staging]
        segments |= {slab.segment for slab in shares if slab._memory.size}  # type: ignore[attr-defined]
    assert world.buffers(first) == 2
    assert len(segments) <= 2
    assert len(world.subscribers[world.nodes[0][1]]._maps) == len(segments)


def test_one_slow_generator_keeps_nobody_and_takes_the_newest_when_it_is_back() -> None:
    world = World([3])
    first, slow, _ = world.nodes[0]
    for stuck, start in ((slow, 0), (first, 20)):
        world.publish(start)
        world.run(1)
        world.take(stuck)
        world.take_all(start, stuck)
        for version in range(start + 1, start + 10):
            world.publish(version)
            world.run(1)
            world.take_all(version, stuck)
        assert world.held[stuck].version == start
        world.release(stuck)
        world.run(0.1)
        found = world.take(stuck)
        assert found is not None
        assert found.version == start + 9
        world.release(stuck)
    assert world.buffers(first) == BUFFERS


def test_two_slow_ones_with_different_versions_delay_the_next_and_are_named() -> None:
    world = World([4], limit_s=5.0)
    first, one, two, _ = world.nodes[0]
    for version, slow in ((0, one), (1, two)):
        world.publish(version)
        world.run(1)
        world.take(slow)
        world.take_all(version, *world.held)
    for version in (2, 3):
        world.publish(version)
    world.run(1)
    world.take_all(3, one, two)
    world.publish(4)
    with pytest.raises(WaitLimitError, match=rf"rank {first} .*version 0 by ranks \[{one}\]; version 1 .*\[{two}\]; v"):
        world.run(10)


def test_a_trainer_waits_for_no_generator_that_loads() -> None:
    world = World([2])
    for version in range(2):
        world.publish(version)
        world.run(1)
        world.take(world.generators[version])
    for version in range(2, 9):
        world.publish(version)
        world.run(1)
    assert len(world.publishers[0]._snapshots) == 2


@pytest.mark.parametrize("verify", [True, False])
def test_a_generator_checks_what_another_one_received(verify: bool) -> None:
    world = World([2], verify=verify)
    first, other = world.nodes[0]
    world.publish(0)
    world.run(1)
    found = world.subscribers[first].take()
    assert found is not None
    found.tensors[0].data[3] ^= 1
    if not verify:
        assert world.subscribers[other].take() is not None
        return
    with pytest.raises(HeadraceError, match=r"Version 0 .*'0\.big' from trainer rank 0 arrived damaged"):
        world.subscribers[other].take()


@pytest.mark.parametrize("told_first", [True, False])
def test_when_the_one_that_pulls_dies_the_next_one_does(told_first: bool) -> None:
    world = World([3], trainers=2)
    first, next_one, last = world.nodes[0]
    world.publish(0)
    world.run(1)
    world.take(last)
    world.publish(1)
    world.run(0.03)  # in the middle of a pull
    world.network.kill(first)
    world.dead.add(first)
    for publisher in world.publishers:
        publisher.drop(first)
        publisher.add(next_one)
        publisher.add(next_one)
        world.run(0 if told_first else 0.5)
    for generator in (next_one, last):
        world.subscribers[generator].drop(first)
    world.run(1)
    assert world.held[last].version == 0, "what the dead one has lent is still there"
    world.release(last)
    world.run(0.1)
    world.take_all(1)
    for version in range(2, 6):
        world.publish(version)
        world.run(1)
        world.take_all(version)


def test_a_dead_generator_keeps_no_buffer() -> None:
    world = World([3])
    first, dies, other = world.nodes[0]
    world.publish(0)
    world.run(1)
    world.take(dies)
    world.publish(1)
    world.run(1)
    assert len(world.subscribers[first]._loans) == 2
    world.network.kill(dies)
    world.dead.add(dies)
    del world.held[dies]
    for generator in (first, other):
        world.subscribers[generator].drop(dies)
    world.take_all(1)
    world.run(1)
    assert world.subscribers[first]._loans == {}
    world.publish(2)
    world.run(1)
    world.take_all(2)


@pytest.mark.parametrize("wrong", ["pid", "descriptor"])
def test_memory_that_cant_be_seen_is_told_to_its_owner(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another process's memory nor a file is taken for it."""
    world = World([2])
    first, other = world.nodes[0]
    with (tmp_path / "file").open("wb+") as file:
        value, said = {"pid": (999_999_999, "No such file"), "descriptor": (file.fileno(), "another process")}[wrong]
        monkeypatch.setattr(
            "headrace.comm.weights_node._describe",
            lambda *share: msgspec.structs.replace(_describe(*share), **{wrong: value}),
        )
        world.publish(0)
        with pytest.raises(HeadraceError, match=rf"rank {other} can't see .* rank {first} \(.*{said}.*: /proc/"):
            world.run(1)
