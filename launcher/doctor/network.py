"""The network between the ranks: who reaches whom, how fast, and whose clock is off.

The `measure_…` functions run on every rank and return the same on all; the `judge_…` functions are pure.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec
import numpy as np

from headrace.launcher.doctor.findings import Finding, fail, ok, warn, worst
from headrace.launcher.doctor.talk import Talk

PING, PONG, CLOCK = 1, 2, 3
"""Tags of messages within a stage."""

PINGS = 20
BULK_BYTES = 1 << 24
BULKS = 4
BROADCAST_BYTES = 1 << 25
BROADCASTS = 3
MOST_ENDS = 64
"""Ends of which every pair is measured; of more, as many are taken, evenly."""

CONNECT_S = 3.0
PEERS = 16
"""Hosts that each one tries to reach; in a ring, so that all are tried."""

SLOW = 0.5
"""Share of what the others reach, below which something is slow."""

SKEW_WARN_S, SKEW_FAIL_S = 1.0, 60.0
CLOCK_PINGS = 5


class Pair(msgspec.Struct, frozen=True):
    """Messages from one end to another: hosts, or ranks where there is one host."""

    sender: str
    receiver: str
    latency_us: float
    """Of 8 bytes."""
    gib_per_s: float
    """Of 16 MiB; a bad cable may be slow one way only."""

    def has(self, end: str) -> bool:
        return end in (self.sender, self.receiver)


# Who reaches whom

Reached = dict[str, list[str]]
"""Addresses by host to which they belong."""


def measure_reach(talk: Talk, addresses: Mapping[str, Sequence[str]], leaders: Mapping[str, int]) -> dict[str, Reached]:
    """Which addresses of others each host can connect to.

    Args:
        addresses: IPv4 addresses of every host.
        leaders: a rank on every host.
    """
    hosts = list(leaders)
    own = next((host for host, rank in leaders.items() if rank == talk.rank), None)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:

        def listen() -> int:
            listener.bind(("", 0))
            listener.listen(socket.SOMAXCONN)
            return int(listener.getsockname()[1])

        def connect() -> Reached:
            if own is None:
                return {}
            start = hosts.index(own) + 1
            peers = (hosts[start:] + hosts[: start - 1])[:PEERS]
            foreign = {peer: outward(addresses[peer], but=addresses[own]) for peer in peers}
            return {peer: _connectable(foreign[peer], ports[leaders[peer]]) for peer in peers}

        ports = talk.stage("open a port", int, listen)
        reached = talk.stage("connect to the other hosts", Reached, connect)
    return {host: reached[rank] for host, rank in leaders.items()}


def outward(addresses: Sequence[str], but: Sequence[str] = ()) -> list[str]:
    """Those that others may reach: no loopback, and none that the other host has, too, as bridges of containers."""
    return [address for address in addresses if not address.startswith("127.") and address not in but]


def _connectable(addresses: Sequence[str], port: int) -> list[str]:
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = list(pool.map(lambda address: _connects(address, port), addresses))
    return [address for address, answer in zip(addresses, answers, strict=True) if answer]


def _connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return True
    except OSError:
        return False


def judge_reach(addresses: Mapping[str, Mapping[str, str]], reached: Mapping[str, Reached]) -> Finding:
    """Every host has an address, not a loopback one, that its peers reach.

    Args:
        addresses: of every host, by interface.
        reached: by the host that tried.
    """
    if len(addresses) == 1:
        return ok("interfaces", "one host: the ranks meet at its loopback address")
    complaints, told = [], []
    for host, named in addresses.items():
        tried = [peer for peer in reached if host in reached[peer]]
        good = [name for name, address in named.items() if all(address in reached[peer][host] for peer in tried)]
        told.append(f"{host} by {', '.join(good)}")
        if not outward(list(named.values())):
            text = f"{host} has only a loopback address, which other hosts can't reach"
            complaints.append(fail("", text, "Give the node a network interface."))
        elif not good:
            lacking = [peer for peer in tried if not reached[peer][host]]
            text = f"{host} ({dict(named)}) isn't reached by {', '.join(lacking or tried)}"
            complaints.append(fail("", text, "Open the firewall between the nodes for ports that the system chooses."))
    return worst("interfaces", complaints, f"reached by all peers: {'; '.join(told)}")


def judge_store(hosts: Sequence[str], address: str, port: int) -> Finding:
    """The address at which all ranks meet for their process groups."""
    where = f"{address}:{port}, a port that the system chose"
    if address.startswith("127.") and len(set(hosts)) > 1:
        text = f"the ranks of {len(set(hosts))} hosts are to meet at the loopback address {address}"
        return fail("rendezvous", text, "Look for hosts that have the same name.")
    return ok("rendezvous", f"all {len(hosts)} ranks met at {where}")


# How fast


def ends_of(leaders: Mapping[str, int], size: int) -> dict[str, int]:
    """What is measured against each other: one rank of every host, or the ranks themselves on one host; by name."""
    found = dict(leaders) if len(leaders) > 1 else {f"rank {rank}": rank for rank in range(size)}
    names = list(found)
    step = max(1, -(-len(names) // MOST_ENDS))
    return {name: found[name] for name in names[::step]}


def rounds(ends: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds in which nobody is in two pairs (the circle method)."""
    places = list(range(ends + ends % 2))
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < ends]
        places.insert(1, places.pop())


def measure_pairs(talk: Talk, ends: Mapping[str, int]) -> list[Pair]:
    """Latency and bandwidth of every pair of ends, both ways."""
    names = {rank: name for name, rank in ends.items()}
    ranks = list(names)

    def part() -> list[Pair]:
        found = []
        for turn in rounds(len(ranks)):
            for a, b in ((ranks[a], ranks[b]) for a, b in turn):
                for sender, receiver in ((a, b), (b, a)):
                    if talk.rank == sender:
                        found.append(Pair(names[sender], names[receiver], *_lead(talk, receiver)))
                    elif talk.rank == receiver:
                        _follow(talk, sender)
        return found

    return [pair for found in talk.stage("measure point-to-point messages", list[Pair], part) for pair in found]


def _lead(talk: Talk, peer: int) -> tuple[float, float]:
    small, bulk = np.zeros(8, np.uint8), np.zeros(BULK_BYTES, np.uint8)
    times = [_round_trip(talk, peer, small) for _ in range(PINGS)]
    rates = [bulk.nbytes / _round_trip(talk, peer, bulk) for _ in range(BULKS)]
    return 1e6 * median(times) / 2, max(rates) / 2**30


def _round_trip(talk: Talk, peer: int, data: np.ndarray) -> float:
    """Seconds from the start of sending until a short answer is here."""
    answer = np.zeros(8, np.uint8)
    began = time.perf_counter()
    talk.finish(talk.comm.Isend(data, peer, PING), f"sending to rank {peer}")
    talk.finish(talk.comm.Irecv(answer, peer, PONG), f"an answer of rank {peer}")
    return time.perf_counter() - began


def _follow(talk: Talk, peer: int) -> None:
    small, bulk = np.zeros(8, np.uint8), np.zeros(BULK_BYTES, np.uint8)
    for data in [small] * PINGS + [bulk] * BULKS:
        talk.finish(talk.comm.Irecv(data, peer, PING), f"a message of rank {peer}")
        talk.finish(talk.comm.Isend(np.zeros(8, np.uint8), peer, PONG), f"answering rank {peer}")


def judge_pairs(pairs: Sequence[Pair], compare: bool) -> Finding:
    """Ends that are slow with all others, then pairs that are slow though both ends are fast with others.

    Args:
        compare: false where all ends are on one host, and only share its cores.
    """
    if not pairs:
        return ok("point-to-point", "nothing to measure between")
    rates = [pair.gib_per_s for pair in pairs]
    text = f"{min(rates):.2f} to {max(rates):.2f} GiB/s, {median(pair.latency_us for pair in pairs):.0f} µs"
    complaints = list(_slow(pairs)) if compare else []
    return worst("point-to-point", complaints, f"{text} over {len(pairs) // 2} pairs, both ways")


def _slow(pairs: Sequence[Pair]) -> Iterator[Finding]:
    slow = slow_ends(pairs)
    for end, (own, others) in slow.items():
        text = f"{end} has {own:.2f} GiB/s with the others, who have {others:.2f} among themselves"
        yield warn("", text, "Look at its link and its neighbours' jobs; leave it out by --exclude.")
    fast = [pair for pair in pairs if not any(map(pair.has, slow))]
    usual = median(pair.gib_per_s for pair in fast) if fast else 0.0
    for pair in fast:
        if pair.gib_per_s < SLOW * usual:
            text = f"{pair.sender} sends {pair.gib_per_s:.2f} GiB/s to {pair.receiver}, usual are {usual:.2f}"
            yield warn("", text, "Look at the switch between them.")


def slow_ends(pairs: Sequence[Pair]) -> dict[str, tuple[float, float]]:
    """Ends that send, or receive, far less than what the others have among themselves: both medians, in GiB/s."""
    found = {}
    for end in dict.fromkeys(pair.sender for pair in pairs):
        sent = [pair.gib_per_s for pair in pairs if pair.sender == end]
        received = [pair.gib_per_s for pair in pairs if pair.receiver == end]
        others = [pair.gib_per_s for pair in pairs if not pair.has(end)]
        own = min(median(sent), median(received))
        if others and own < SLOW * median(others):
            found[end] = own, median(others)
    return found


def measure_broadcasts(talk: Talk, ends: Mapping[str, int]) -> dict[str, float]:
    """GiB/s of a broadcast to all ranks, by the end that sends: until the slowest rank has it."""
    buffer = np.zeros(BROADCAST_BYTES, np.uint8)

    def best(root: int) -> float:
        return min(once(root) for _ in range(BROADCASTS))

    def once(root: int) -> float:
        talk.finish(talk.comm.Ibarrier(), "a barrier of all ranks")
        began = time.perf_counter()
        talk.finish(talk.comm.Ibcast(buffer, root), f"a broadcast from rank {root}")
        return time.perf_counter() - began

    names = list(ends)[:PEERS] if talk.size > 1 else []
    times = talk.stage("broadcast", list[float], lambda: [best(ends[name]) for name in names])
    slowest = [max(column) for column in zip(*times, strict=True)]
    return {name: BROADCAST_BYTES / took / 2**30 for name, took in zip(names, slowest, strict=True)}


def judge_broadcasts(rates: Mapping[str, float], compare: bool) -> Finding:
    """Senders that are far slower than the others; `compare` as in `judge_pairs`."""
    if not rates:
        return ok("broadcast", "nobody to send to")
    usual = median(rates.values())
    slow = [name for name, rate in rates.items() if rate < SLOW * usual] if compare and len(rates) > 2 else []
    remedy = "Look at its link; leave it out by --exclude."
    complaints = [warn("", f"from {name} {rates[name]:.2f} GiB/s, usual are {usual:.2f}", remedy) for name in slow]
    return worst("broadcast", complaints, f"to all ranks, by sender: median {usual:.2f} GiB/s")


# Clocks


def measure_clocks(talk: Talk, leaders: Mapping[str, int]) -> dict[str, float]:
    """Seconds by which the clock of each host is ahead of rank 0's: the best of some round trips."""
    peers = {host: rank for host, rank in leaders.items() if rank != 0}

    def part() -> dict[str, float]:
        if talk.rank == 0:
            return {host: min(_offset(talk, rank) for _ in range(CLOCK_PINGS))[1] for host, rank in peers.items()}
        if talk.rank in peers.values():
            for _ in range(CLOCK_PINGS):
                talk.finish(talk.comm.Irecv(np.empty(1), 0, CLOCK), "a question for the time")
                talk.finish(talk.comm.Isend(np.array([time.time()]), 0, CLOCK), "telling the time")
        return {}

    return talk.stage("compare their clocks", dict[str, float], part)[0]


def _offset(talk: Talk, rank: int) -> tuple[float, float]:
    """Time of the round trip and how far the other clock is ahead, in seconds."""
    there = np.empty(1)
    began = time.time()
    talk.finish(talk.comm.Isend(np.empty(1), rank, CLOCK), f"asking rank {rank} for the time")
    talk.finish(talk.comm.Irecv(there, rank, CLOCK), f"the time of rank {rank}")
    ended = time.time()
    return ended - began, float(there[0]) - (began + ended) / 2


def judge_clocks(ahead: Mapping[str, float]) -> Finding:
    """Which failure came first is told by the dates of files."""
    if not ahead:
        return ok("clocks", "one host: one clock")
    remedy = "Set the clocks by NTP (chronyc tracking)."
    far = {host: skew for host, skew in ahead.items() if abs(skew) > SKEW_WARN_S}
    complaints = [
        (fail if abs(skew) > SKEW_FAIL_S else warn)("", f"{host} is {skew:+.1f} s off rank 0's host", remedy)
        for host, skew in far.items()
    ]
    return worst("clocks", complaints, f"all within {max(map(abs, ahead.values())):.3f} s of rank 0's")
