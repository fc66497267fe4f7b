"""The `collective` weight transport: real gloo groups between threads, messages over the simulated network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from headrace.comm.devices import CPU, Device
from headrace.comm.errors import HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.groups import LOOPBACK, DeviceGroup, _serve, make_group
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.weights import TensorSpec, Version, WeightTensor
from headrace.comm.weights_collective import Broadcaster, CollectivePublisher, CollectiveSubscriber

BUCKET = 100
T = TypeVar("T")


class CountedGroup(DeviceGroup):
    """Counts its broadcasts, and may damage what it received."""

    def __init__(self, group: DeviceGroup) -> None:
        super().__init__(group.handle, group.members, group.name)
        object.__setattr__(self, "sizes", [])
        object.__setattr__(self, "damage", lambda tensor, root: None)

    sizes: list[int]
    damage: Callable[[torch.Tensor, int], None]

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        self.sizes.append(tensor.numel())
        wait = super().begin_broadcast(tensor, root)

        def damaging() -> None:
            wait()
            self.damage(tensor, root)

        return damaging


class Job:
    """Trainers are ranks 0 … T-1; a main thread per rank comes from `each`, and one courier thread serves them all."""

    def __init__(
        self, specs: Sequence[Sequence[TensorSpec]], generators: int, timeout_s: float = 20.0, limit_s: float = 20.0
    ) -> None:
        self.specs = specs
        self.trainers = list(range(len(specs)))
        self.generators = list(range(len(specs), len(specs) + generators))
        self.members = [*self.trainers, *self.generators]
        self._server = _serve(LOOPBACK, timeout_s)
        self._network = SimulatedNetwork(len(self.members))
        self.groups = self.each(self.members, lambda rank: self._group(rank, timeout_s))
        self.publishers = [self._publisher(t, limit_s) for t in self.trainers]
        self.subscribers = {g: self._subscriber(g) for g in self.generators}

    def each(self, ranks: Sequence[int], work: Callable[[int], T]) -> dict[int, T]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return dict(zip(ranks, pool.map(work, ranks), strict=True))

    def _group(self, rank: int, timeout_s: float) -> CountedGroup:
        store = TCPStore(LOOPBACK, self._server.port, is_master=False, timeout=timedelta(seconds=timeout_s))
        return CountedGroup(make_group("gloo", store, "weights", self.members, rank, timeout_s))

    def _publisher(self, rank: int, limit_s: float) -> CollectivePublisher:
        broadcaster = Broadcaster(self.groups[rank], CPU, BUCKET)
        transport = self._network.transport(rank)
        return CollectivePublisher(transport, broadcaster, self.trainers, self.generators, True, limit_s)

    def _subscriber(self, rank: int) -> CollectiveSubscriber:
        broadcaster = Broadcaster(self.groups[rank], CPU, BUCKET)
        return CollectiveSubscriber(self._network.transport(rank), broadcaster, self.trainers, verify=True)

    @contextmanager
    def courier(self) -> Iterator[None]:
        stop = threading.Event()

        def serve() -> None:
            while not stop.wait(1e-3):
                for service in (*self.publishers, *self.subscribers.values()):
                    for received in service._transport.poll():
                        service.receive(received, time.monotonic())
                    service.tick(time.monotonic())

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def share(self, trainer: int, version: int) -> list[WeightTensor]:
        rng = np.random.default_rng([trainer, version])
        return [WeightTensor(s, rng.integers(0, 256, s.nbytes, np.uint8)) for s in self.specs[trainer]]

    def publish(self, trainer: int, version: int) -> None:
        self.publishers[trainer].publish(version, iter(self.share(trainer, version)))

    def next(self, generator: int) -> Version:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.subscribers[generator].waiting:
                found = self.subscribers[generator].take()
                assert found is not None
                assert not self.subscribers[generator].waiting
                return found
            time.sleep(1e-3)
        raise AssertionError("no version came")

    def round(self, version: int) -> None:
        """One version from all trainers to all generators, checked bit for bit."""

        def turn(rank: int) -> None:
            if rank in self.trainers:
                self.publish(rank, version)
            else:
                self._check(self.next(rank), version)

        self.each(self.members, turn)

    def _check(self, found: Version, version: int) -> None:
        assert found.version == version
        expected = [tensor for trainer in self.trainers for tensor in self.share(trainer, version)]
        assert [tensor.spec for tensor in found.tensors] == [tensor.spec for tensor in expected]
        for got, sent in zip(found.tensors, expected, strict=True):
            np.testing.assert_array_equal(got.data, sent.data)
        found.release()


def shares(trainers: int) -> list[list[TensorSpec]]:
    """A tensor larger than a bucket, an odd one, one without elements; the last trainer of three sends nothing."""
    return [
        [
            TensorSpec(f"{t}.big", "float32", (7, 11)),
            TensorSpec(f"{t}.odd", "bfloat16", (3, 5)),
            TensorSpec(f"{t}.empty", "float32", (4, 0)),
            TensorSpec(f"{t}.scalar", "uint8", ()),
        ]
        if t < 2
        else []
        for t in range(trainers)
    ]


@pytest.mark.parametrize(("trainers", "generators"), [(1, 1), (1, 4), (2, 2), (3, 1)])
def test_all_versions_arrive_bit_for_bit_and_only_the_first_round_sets_up(trainers: int, generators: int) -> None:
    job = Job(shares(trainers), generators)
    rounds: list[dict[int, list[int]]] = []
    with job.courier():
        for version in (0, 1, 4):
            job.round(version)
            rounds.append({rank: list(group.sizes) for rank, group in job.groups.items()})
            for group in job.groups.values():
                group.sizes.clear()
    assert all(sizes == rounds[0][0] for sizes in rounds[0].values()), "one order of collectives on every rank"
    assert rounds[1] == rounds[2]
    assert len(rounds[0][0]) > len(rounds[1][0])
    first_round_only = len(rounds[0][0]) - len(rounds[1][0])
    manifests = sum(-(-size // BUCKET) for size in _manifest_sizes(job))
    assert first_round_only == trainers + manifests


def test_the_first_root_sends_while_it_packs_once_it_knows_that_packing_is_quick() -> None:
    job = Job(shares(2), generators=2)
    sent: list[int] = []

    def tensors(version: int) -> Iterator[WeightTensor]:
        before = len(job.groups[0].sizes)
        for tensor in job.share(0, version):
            deadline = time.monotonic() + 10.0
            while job.publishers[0]._missing() and time.monotonic() < deadline:
                time.sleep(1e-3)
            yield tensor
        sent.append(len(job.groups[0].sizes) - before)

    def publish(trainer: int, version: int) -> None:
        given = tensors(version) if trainer == 0 else iter(job.share(trainer, version))
        job.publishers[trainer].publish(version, given)

    job.publish = publish  # type: ignore[method-assign]
    with job.courier():
        job.round(0)
        for publisher in job.publishers:
            publisher._send_s = 60.0
        job.round(1)
    assert sent == [0, job.share(0, 0)[0].spec.nbytes // BUCKET]
    assert all(group.sizes == job.groups[0].sizes for group in job.groups.values())


def test_slow_packing_keeps_nobody_waiting() -> None:
    """Where packing takes longer than the broadcast, a version is announced when it is whole."""
    job = Job(shares(1), generators=1)
    announced: list[int] = []

    def tensors(version: int) -> Iterator[WeightTensor]:
        for tensor in job.share(0, version):
            time.sleep(0.02)
            announced.append(job.publishers[0]._version)
            yield tensor

    job.publish = lambda trainer, version: job.publishers[0].publish(version, tensors(version))  # type: ignore[method-assign]
    with job.courier():
        for version in range(3):
            announced.clear()
            job.round(version)
            assert set(announced) == {version - 1}
            job.publishers[0]._send_s = 0.0  # the machine may be busy


def _manifest_sizes(job: Job) -> list[int]:
    import msgspec

    return [len(msgspec.msgpack.encode(list(specs))) for specs in job.specs]


def test_buffers_are_kept_from_round_to_round() -> None:
    job = Job(shares(2), generators=1)
    addresses = []
    with job.courier():
        for version in range(4):
            job.round(version)
            slabs = [*job.subscribers[2]._slabs.values(), *(p._slab for p in job.publishers)]
            slabs += [p._scratch for p in job.publishers]
            addresses.append([slab._memory.ctypes.data for slab in slabs])
    assert addresses[0] == addresses[-1]


def test_a_generator_that_doesnt_join_is_named_with_what_it_last_joined() -> None:
    job = Job(shares(1), generators=2, timeout_s=2.0, limit_s=1.0)
    with job.courier(), ThreadPoolExecutor(1) as pool:
        job.round(3)
        joined = pool.submit(job.next, 1)
        with pytest.raises(WaitLimitError, match=r"version 4 .*Missing: rank 2 \(last joined for version 3\)\."):
            job.publish(0, 4)
        with pytest.raises(PeerLostError, match="A broadcast from rank 0"):
            joined.result()


def test_a_trainer_that_dies_after_the_announcement_is_named_as_the_root() -> None:
    job = Job(shares(1), generators=1, timeout_s=1.0)
    with job.courier():
        publisher = job.publishers[0]
        publisher._version = 0
        with pytest.raises(PeerLostError, match=r"broadcast from rank 0 over the ranks \[0, 1\]"):
            job.next(1)


def test_a_damaged_tensor_is_named_with_its_sender() -> None:
    job = Job(shares(2), generators=1)

    def damage(tensor: torch.Tensor, root: int) -> None:
        if root == 1 and tensor.numel() == BUCKET:
            tensor[60] ^= 1

    with job.courier():
        job.round(0)
        object.__setattr__(job.groups[2], "damage", damage)
        with pytest.raises(HeadraceError, match=r"Version 1 .* tensor '1.big' from trainer rank 1 arrived damaged"):
            job.round(1)


def test_shares_of_another_shape_are_refused() -> None:
    job = Job(shares(1), generators=0)
    job.publish(0, 0)
    job.specs = [[TensorSpec("0.big", "float32", (7, 12))]]
    with pytest.raises(ValueError, match="must stay the same"):
        job.publish(0, 1)


def test_a_version_must_be_released_before_the_next_is_taken() -> None:
    job = Job(shares(1), generators=1)
    with job.courier():
        found = job.each([0, 1], lambda rank: job.publish(0, 0) if rank == 0 else job.next(1))[1]
        assert found is not None
        job.publishers[0]._version = 1
        with pytest.raises(RuntimeError, match="version 0 must be released"):
            job.next(1)


class Elsewhere(Device):
    """Looks like an accelerator, but its memory is the host's."""

    def torch_device(self, local_index: int = 0) -> torch.device:
        return torch.device("cpu")


def test_on_an_accelerator_every_bucket_passes_through_one_device_buffer() -> None:
    job = Job(shares(1), generators=1)
    sent = np.random.default_rng(0).integers(0, 256, 250, np.uint8)
    received = np.zeros(250, np.uint8)
    broadcasters = {rank: Broadcaster(job.groups[rank], Elsewhere("npu", "hccl"), BUCKET) for rank in (0, 1)}
    addresses = []
    for _ in range(2):
        job.each([0, 1], lambda rank: broadcasters[rank].run(0, sent if rank == 0 else received, mine=rank == 0))
        np.testing.assert_array_equal(received, sent)
        received[:] = 0
        addresses.append([broadcaster._bucket.data_ptr() for broadcaster in broadcasters.values()])
    assert addresses[0] == addresses[1]
    assert job.groups[0].sizes == [BUCKET, BUCKET, 50] * 2


def test_a_group_goes_by_job_ranks() -> None:
    job = Job(shares(1), generators=2)
    tensors = {rank: torch.full((3,), rank) for rank in job.members}
    groups = {
        rank: replace(DeviceGroup(g.handle, (0, 1, 2), "x"), members=(10, 11, 12)) for rank, g in job.groups.items()
    }
    job.each(job.members, lambda rank: groups[rank].broadcast(tensors[rank], root=12))
    assert [tensor.tolist() for tensor in tensors.values()] == [[2, 2, 2]] * 3
