"""What follows from the facts and the measurements of all ranks. Pure; every trouble is made up."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.launcher.doctor import hosts, network
from headrace.launcher.doctor.hosts import Facts
from headrace.launcher.doctor.network import Pair
from headrace.launcher.doctor.shared import Seen, judge_shared
from headrace.launcher.doctor.world import _silent

GOOD = Facts(
    host="node1",
    network="boot/net:[1]",
    cpus=[0, 1, 2, 3],
    cores=8,
    threads=1,
    thread_level=3,
    library="MPICH 5",
    device="cpu",
    devices=0,
    visible="",
    addresses={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    own_address="10.0.0.1",
    versions={"python": "3.11", "torch": "2.13"},
    shared_memory=1 << 34,
    open_files=4096,
    caches={"/tmp/x": "ext4"},
)


def ranks(*changes: dict[str, object]) -> list[Facts]:
    """A rank for each, with these facts changed."""
    return [msgspec.structs.replace(GOOD, **change) for change in changes]


def test_a_rank_that_is_stuck_in_mpi_ends_itself_and_that_is_told() -> None:
    code = "import time; from headrace.launcher.doctor.__main__ import _end_after; _end_after(0.3); time.sleep(30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25)
    assert done.returncode == 1
    (found,) = _silent("no report", done.stderr).findings
    assert (found.level, found.text.splitlines()[0]) == ("FAIL", "no report; a rank was stuck in a call of MPI")


def test_two_good_ranks_pass_every_judge() -> None:
    facts = ranks({}, {})
    for judge in (
        *(hosts.judge_hosts, hosts.judge_host_names, hosts.judge_thread_level, hosts.judge_versions),
        *(hosts.judge_cpus, hosts.judge_devices, hosts.judge_memory, hosts.judge_open_files),
        hosts.judge_cache_folders,
    ):
        assert judge(facts).level == "OK", judge


def test_machines_of_one_name_are_told_apart_by_their_network() -> None:
    found = hosts.judge_hosts(ranks({}, {"network": "boot/net:[2]"}))
    assert (found.level, found.text) == ("FAIL", "different machines or containers have the same host name: node1")


@pytest.mark.parametrize(("address", "told"), [("127.0.1.1", "is a loopback address"), ("", "doesn't resolve")])
def test_a_name_that_leads_nowhere_matters_only_with_several_hosts(address: str, told: str) -> None:
    assert hosts.judge_host_names(ranks({"own_address": address}, {"own_address": address})).level == "OK"
    found = hosts.judge_host_names(ranks({}, {"host": "node2", "own_address": address}))
    assert (found.level, "node2: the own name " + told) == ("WARN", found.text)


def test_an_mpi_without_threads_fails() -> None:
    assert hosts.judge_thread_level(ranks({}, {"thread_level": 1})).text == "level FUNNELED, needed: SERIALIZED"


def test_different_software_is_told_with_the_ranks_that_have_it() -> None:
    other = {"library": "Open MPI 5", "versions": {"python": "3.11", "torch": "2.6"}}
    found = hosts.judge_versions(ranks({}, other, {}))
    assert found.level == "FAIL"
    assert "MPI library: MPICH 5 on ranks 0,2, Open MPI 5 on ranks 1" in found.text
    assert "torch: 2.13 on ranks 0,2, 2.6 on ranks 1" in found.text


def test_ranks_bound_to_one_core_fail_and_crowded_ones_warn() -> None:
    one = hosts.judge_cpus(ranks({"cpus": [0]}, {"cpus": [0]}))
    assert (one.level, "--cpus-per-task to srun" in one.remedy) == ("FAIL", True)
    assert "bound to a single one of 8 CPUs" in one.text
    crowd = hosts.judge_cpus(ranks(*[{"threads": 3}] * 2))
    assert (crowd.level, crowd.text) == ("WARN", "node1: ranks 0-1 on CPUs 0-3 compute with 6 threads in all")
    assert hosts.judge_cpus(ranks({"cpus": [0]}, {"cpus": [1]})).level == "OK"
    assert hosts.judge_cpus(ranks({"cpus": [0], "threads": 4})).level == "WARN"


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ([{"device": "npu", "devices": 2}] * 2, "OK"),
        ([{"device": "npu", "devices": 1}] * 2, "FAIL"),
        ([{"device": "cuda", "devices": 1, "visible": "0"}, {"device": "cuda", "devices": 1, "visible": "1"}], "OK"),
        ([{"device": "cuda", "devices": 1}, {}], "FAIL"),
        ([{"device": "cuda", "devices": 1}, {"device": "cuda", "devices": 1, "host": "node2"}], "OK"),
    ],
)
def test_every_rank_needs_a_device_of_its_own(changes: list[dict[str, object]], level: str) -> None:
    assert hosts.judge_devices(ranks(*changes)).level == level


def test_little_shared_memory_and_few_files_are_warnings() -> None:
    assert (
        "0.1 GiB of shared memory free on node2"
        in hosts.judge_memory(ranks({}, {"host": "node2", "shared_memory": 64 << 20})).text
    )
    assert hosts.judge_open_files(ranks({}, {"open_files": 256})).level == "WARN"


def test_ranks_are_written_as_ranges() -> None:
    assert hosts.ranges([5, 0, 1, 2, 9, 10]) == "0-2,5,9-10"


# Who reaches whom

TWO = {"a": {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}, "b": {"eth0": "10.0.0.2"}}


def test_the_interfaces_that_all_peers_reach_are_named() -> None:
    found = network.judge_reach(TWO, {"a": {"b": ["10.0.0.2"]}, "b": {"a": ["10.1.0.1"]}})
    assert (found.level, found.text) == ("OK", "reached by all peers: a by ib0; b by eth0")


def test_a_host_behind_a_firewall_fails_with_who_cannot_reach_it() -> None:
    found = network.judge_reach(TWO, {"a": {"b": []}, "b": {"a": ["10.1.0.1"]}})
    assert (found.level, "b ({'eth0': '10.0.0.2'}) isn't reached by a" in found.text) == ("FAIL", True)


def test_loopback_is_refused_across_hosts_and_fine_on_one() -> None:
    lone = {"a": {"lo": "127.0.0.1"}}
    assert network.judge_reach(lone, {"a": {}}).level == "OK"
    found = network.judge_reach({**lone, "b": TWO["b"]}, {"a": {"b": ["10.0.0.2"]}, "b": {"a": []}})
    assert (found.level, "a has only a loopback address" in found.text) == ("FAIL", True)
    assert network.judge_store(["a", "b"], "127.0.0.1", 4711).level == "FAIL"
    assert network.judge_store(["a", "a"], "127.0.0.1", 4711).level == "OK"


def test_neither_loopback_nor_an_address_of_ones_own_is_tried() -> None:
    assert network.outward(["127.0.0.1", "172.17.0.1", "10.0.0.2"], but=["172.17.0.1"]) == ["10.0.0.2"]


# How fast


@given(st.integers(0, 40))
def test_every_pair_has_its_round_and_nobody_is_in_two_at_once(ends: int) -> None:
    turns = list(network.rounds(ends))
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(a, b) for a in range(ends) for b in range(a + 1, ends)]
    for turn in turns:
        busy = [end for pair in turn for end in pair]
        assert len(busy) == len(set(busy))


def pairs_of(ends: str, **slow: float) -> list[Pair]:
    """Both ways between all ends at 10 GiB/s, but for `ab` (a sends to b), `a_` (a sends) and `_a` (a receives)."""
    return [
        Pair(a, b, 5.0, min(10.0, *(slow.get(name, 10.0) for name in (a + b, f"{a}_", f"_{b}"))))
        for a in ends
        for b in ends
        if a != b
    ]


@pytest.mark.parametrize("ends", ["abc", "abcd", "abcdefgh"])
@pytest.mark.parametrize("way", ["b_", "_b"])
def test_a_slow_node_stands_out_though_it_is_slow_one_way_only(ends: str, way: str) -> None:
    found = network.judge_pairs(pairs_of(ends, **{way: 2.0}), compare=True)
    assert found.level == "WARN"
    assert found.text == "b has 2.00 GiB/s with the others, who have 10.00 among themselves"


def test_two_slow_nodes_of_eight_stand_out() -> None:
    assert network.slow_ends(pairs_of("abcdefgh", _b=2.0, f_=1.0)).keys() == {"b", "f"}


def test_a_slow_pair_is_told_though_both_nodes_are_fast_with_others() -> None:
    found = network.judge_pairs(pairs_of("abcd", ac=1.0), compare=True)
    assert found.text == "a sends 1.00 GiB/s to c, usual are 10.00"


def test_equal_nodes_two_nodes_and_ranks_of_one_host_are_not_judged() -> None:
    assert network.judge_pairs(pairs_of("abcd"), compare=True).level == "OK"
    assert network.judge_pairs(pairs_of("ab", ab=9.0), compare=True).level == "OK"
    assert network.judge_pairs(pairs_of("abc", _b=1.0), compare=False).level == "OK"
    assert network.judge_pairs([], compare=False).level == "OK"


def test_a_slow_sender_of_broadcasts_stands_out() -> None:
    found = network.judge_broadcasts({"a": 1.0, "b": 0.1, "c": 1.1}, compare=True)
    assert (found.level, found.text) == ("WARN", "from b 0.10 GiB/s, usual are 1.00")
    assert network.judge_broadcasts({"a": 1.0, "b": 0.1, "c": 1.1}, compare=False).level == "OK"


def test_of_many_nodes_some_are_measured() -> None:
    leaders = {f"node{number}": 8 * number for number in range(1000)}
    ends = network.ends_of(leaders, 8000)
    assert 50 <= len(ends) <= network.MOST_ENDS
    assert ends.items() <= leaders.items()
    assert network.ends_of({"node1": 0}, 3) == {"rank 0": 0, "rank 1": 1, "rank 2": 2}


@pytest.mark.parametrize(("skew", "level"), [(0.1, "OK"), (-5.0, "WARN"), (90.0, "FAIL")])
def test_clocks_that_are_apart_are_told(skew: float, level: str) -> None:
    found = network.judge_clocks({"node2": skew, "node3": 0.0})
    assert found.level == level
    assert level == "OK" or f"node2 is {skew:+.1f} s off" in found.text


def test_a_run_folder_that_is_not_shared_fails_and_loose_locks_warn(tmp_path) -> None:
    good = Seen(True, True, 0.1)
    assert judge_shared(tmp_path, {"b": good}).level == "OK"
    assert judge_shared(tmp_path, {"b": good, "c": Seen(True, False, 0.1)}).level == "WARN"
    found = judge_shared(tmp_path, {"b": good, "c": Seen(False, False, 10.0)})
    assert (found.level, found.text) == ("FAIL", f"c can't see {tmp_path} of rank 0's host")
