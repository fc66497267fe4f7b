"""Which rank does what: a pure function of the list of hosts and the config, computed alike by every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from headrace.comm.errors import ConfigError
from headrace.ranks.config import RanksConfig

Role = Literal["generator", "trainer"]


@dataclass(frozen=True, slots=True)
class RoleMap:
    """Who is who. Trainer 0 is always rank 0."""

    hosts: tuple[str, ...]
    """Host of every rank."""
    trainers: tuple[int, ...]
    """World ranks of the trainers, by index."""
    generators: tuple[int, ...]
    """World ranks of the generators, by index."""

    def role(self, rank: int) -> Role:
        return "trainer" if rank in self.trainers else "generator"

    def index(self, rank: int) -> int:
        """Position of a rank within its role."""
        members = self.trainers if rank in self.trainers else self.generators
        return members.index(rank)

    def local_index(self, rank: int) -> int:
        """Position of a rank within its host, which chooses its device."""
        return self.hosts[:rank].count(self.hosts[rank])

    def node_mates(self, generator: int) -> tuple[int, ...]:
        """World ranks of the generators on the host of this one, itself among them."""
        return tuple(rank for rank in self.generators if self.hosts[rank] == self.hosts[generator])

    def first_of_nodes(self, generators: Sequence[int]) -> tuple[int, ...]:
        """The first of these (world ranks) on every host."""
        first: dict[str, int] = {}
        for generator in sorted(generators):
            first.setdefault(self.hosts[generator], generator)
        return tuple(first.values())

    def home_ledger(self, generator: int) -> int:
        """World rank of the ledger that the generator (an index) asks first."""
        return self.trainers[generator % len(self.trainers)]

    def name(self, rank: int) -> str:
        """For messages: rank, role and host."""
        return f"rank {rank} ({self.role(rank)} {self.index(rank)} on {self.hosts[rank]})"

    def describe(self, cores: Sequence[str] = ()) -> str:
        """The role map as it is printed once at the start; with the cores that every rank may run on, if given."""
        lines = [f"{len(self.hosts)} ranks: {len(self.generators)} generators, {len(self.trainers)} trainers"]
        for host in dict.fromkeys(self.hosts):
            ranks = [rank for rank, where in enumerate(self.hosts) if where == host]
            parts = [
                f"{role}s {number_ranges([r for r in ranks if self.role(r) == role])}"
                for role in ("trainer", "generator")
                if any(self.role(r) == role for r in ranks)
            ]
            masks = list(dict.fromkeys(cores[rank] for rank in ranks)) if cores else []
            shown = f"; cores {' | '.join(masks)}" if masks else ""
            lines.append(f"  {host}: {', '.join(parts)}{shown}")
        return "\n".join(lines)


def plan_roles(hosts: Sequence[str], config: RanksConfig) -> RoleMap:
    """Place the trainers; every other rank generates.

    Raises:
        ConfigError: the number of ranks doesn't equal what the roles ask for.
    """
    wanted = config.trainers + config.generators
    if len(hosts) != wanted:
        raise ConfigError(
            f"The job has {len(hosts)} ranks, but ranks.trainers={config.trainers} and "
            f"ranks.generators={config.generators} ask for {wanted}. Start it with -n {wanted}, or change the numbers."
        )
    by_host = [[r for r, where in enumerate(hosts) if where == host] for host in dict.fromkeys(hosts)]
    order = _by_node(by_host) if config.placement == "by_node" else _spread(by_host)
    trainers = tuple(sorted(order[: config.trainers]))
    generators = tuple(rank for rank in range(len(hosts)) if rank not in trainers)
    return RoleMap(tuple(hosts), trainers, generators)


def _by_node(by_host: list[list[int]]) -> list[int]:
    """Trainers fill one node after the other."""
    return [rank for ranks in by_host for rank in ranks]


def _spread(by_host: list[list[int]]) -> list[int]:
    """Trainers are dealt over the nodes in turn, the first ranks of each."""
    depth = max(len(ranks) for ranks in by_host)
    return [ranks[turn] for turn in range(depth) for ranks in by_host if turn < len(ranks)]


def number_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)
