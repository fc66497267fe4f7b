"""Addresses, stores and groups on one host, with threads for ranks."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from headrace.comm import groups
from headrace.comm.errors import HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.network import interfaces, outer_addresses


class Request:
    """Completes at the second look, or never."""

    def __init__(self, completes: bool) -> None:
        self.completes = completes
        self.looks = 0

    def Test(self) -> bool:  # noqa: N802
        self.looks += 1
        return self.completes and self.looks > 1


class LoneComm:
    """A communicator of the root alone, whose peers reach only some addresses; or come to the first `stages` only."""

    def __init__(self, reached_by_peers: list[int], stages: int = 100) -> None:
        self.reached_by_peers = np.array(reached_by_peers, np.uint8)
        self.stages = stages

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Ibcast(self, data: Any, root: int) -> Request:  # noqa: N802
        return self._request()

    def Iallreduce(self, mine: Any, agreed: Any, op: Any) -> Request:  # noqa: N802
        agreed[:] = np.minimum(mine, self.reached_by_peers)
        return self._request()

    def _request(self) -> Request:
        self.stages -= 1
        return Request(self.stages >= 0)


def meeting(comm: LoneComm) -> groups._Meeting:
    return groups._Meeting(comm, root=0, timeout_s=5.0)  # type: ignore[arg-type]


def test_the_first_address_that_all_ranks_reach_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "outer_addresses", lambda: ["127.0.0.5", "127.0.0.6", "127.0.0.7"])
    assert groups._reachable_address(meeting(LoneComm([0, 1, 1])), ["a", "b"]) == "127.0.0.6"


def test_hosts_without_a_common_network_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "outer_addresses", lambda: ["127.0.0.5"])
    with pytest.raises(HeadraceError, match=r"\['a', 'b'\] have no network in common: .*127\.0\.0\.5.* of a"):
        groups._reachable_address(meeting(LoneComm([0])), ["a", "b"])


@pytest.mark.parametrize(
    ("hosts", "stages", "words"),
    [
        (["a", "b"], 0, "tells its addresses"),
        (["a", "b"], 1, "tells its addresses"),
        (["a", "b"], 2, "every rank tells which of these addresses it reaches"),
        (["a", "b"], 3, "tells where it listens"),
        (["a", "a"], 0, "tells where it listens"),
    ],
)
def test_a_rank_that_does_not_arrive_at_a_stage_of_the_start_up_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], stages: int, words: str
) -> None:
    monkeypatch.setattr(groups, "outer_addresses", lambda: ["127.0.0.5"])
    with pytest.raises(WaitLimitError, match=rf"rank 0 waited 0\.05 s .*{words}: a rank hasn't arrived there"):
        groups.share_store(LoneComm([1], stages), hosts, timeout_s=0.05)  # type: ignore[arg-type]


def test_a_store_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(WaitLimitError, match=rf"store of rank 3 at 127\.0\.0\.1:{port} couldn't be reached"):
            groups._connect("127.0.0.1", port, root=3, timeout_s=0.2)


def test_loopback_is_no_candidate_across_hosts() -> None:
    assert "127.0.0.1" in interfaces().values()
    assert not any(address.startswith("127.") for address in outer_addresses())


def test_a_closed_port_cant_be_connected_to() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert not groups._can_connect("127.0.0.1", sock.getsockname()[1])
        sock.listen()
        assert groups._can_connect("127.0.0.1", sock.getsockname()[1])


def test_the_way_to_loopback_is_loopback() -> None:
    assert groups.local_address("127.0.0.1") == "127.0.0.1"
    assert groups.interface_of("127.0.0.1") == "lo"
    with pytest.raises(HeadraceError, match=r"203\.0\.113\.1.*GLOO_SOCKET_IFNAME"):
        groups.interface_of("203.0.113.1")


def test_a_store_listens_on_its_address_only_and_two_have_different_ports() -> None:
    one, two = groups._serve("127.0.0.2", 5.0), groups._serve("127.0.0.2", 5.0)
    assert one.port != two.port
    assert groups._can_connect("127.0.0.2", one.port)
    assert not groups._can_connect("127.0.0.1", one.port)


def test_two_groups_over_one_store_dont_mix_and_a_missing_member_is_limited() -> None:
    server = groups._serve(groups.LOOPBACK, 10.0)

    def store() -> TCPStore:
        return TCPStore(groups.LOOPBACK, server.port, is_master=False, timeout=timedelta(seconds=10))

    def member(rank: int) -> list[int]:
        both = groups.make_group("gloo", store(), "both", [4, 9], rank, 1.0)
        back = groups.make_group("gloo", store(), "back", [9, 4], rank, 1.0)
        one, two = torch.tensor([rank]), torch.tensor([rank])
        both.broadcast(one, root=4)
        back.broadcast(two, root=9)
        if rank == 4:
            with pytest.raises(PeerLostError, match=r"from rank 9 over the ranks \[4, 9\] \(group 'both'\)"):
                both.broadcast(one, root=9)
        return [int(one), int(two)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(member, [4, 9])) == [[4, 9], [4, 9]]


def test_the_replicas_default_group_needs_no_host_name_and_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    server = groups._serve(groups.LOOPBACK, 10.0)
    groups.init_replica_group(server, "gloo", rank=0, size=1, timeout_s=10.0)
    try:
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        tensor = torch.ones(2)
        torch.distributed.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
    finally:
        torch.distributed.destroy_process_group()
