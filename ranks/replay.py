"""Steps that are trained again after a crash, with the groups that they were trained with.

    main thread of every trainer, before its main loop:
        publish the version of the checkpoint                    the generators evaluate nothing and grant nothing yet
        for each step: pull this replica's groups from whoever holds them now → learner.learn → Release
    then the main loop begins with the version after the last of them

Nothing is reported: the lines of these steps are in the metrics already. The ledgers stand after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headrace.comm.courier import Courier
from headrace.comm.errors import HeadraceError
from headrace.comm.exchange import ExchangeConsumer, Groups
from headrace.comm.messages import Release
from headrace.comm.spilling import LostGroupsError
from headrace.comm.trajectories import trajectories_by_key
from headrace.comm.trajectory import Trajectory
from headrace.ranks.heartbeat import MainState
from headrace.ranks.learner import Learner
from headrace.ranks.shutdown import until
from headrace.ranks.tickets import FormedStep
from headrace.ranks.trainer import Key, mask_older


class Replay:
    """One trainer's part in it; all trainers train the same steps in the same order."""

    def __init__(
        self,
        index: int,
        courier: Courier,
        consumer: ExchangeConsumer,
        learner: Learner,
        main: MainState,
        mask_age: int | None,
        wait_limit_s: float,
    ) -> None:
        """`index`: of the trainer. `mask_age`: as in `TrainerLoop`."""
        self._index = index
        self._courier = courier
        self._consumer = consumer
        self._learner = learner
        self._main = main
        self._mask_age = mask_age
        self._wait_limit = wait_limit_s

    def run(self, steps: Sequence[FormedStep]) -> Iterator[None]:
        """Train them; yields while data are on their way.

        Raises:
            WaitLimitError: names the generators whose data haven't come within the limit.
            HeadraceError: a generator can't read some of them any more.
        """
        for formed in steps:
            self._main.set(f"training step {formed.step} again")
            indices = [i for i, group in enumerate(formed.groups) if group.replica == self._index]
            owners: dict[int, list[Key]] = {}
            for group in (formed.groups[i] for i in indices):
                owners.setdefault(group.owner, []).append((group.ticket, group.attempt))
            data: dict[Key, list[Trajectory]] = {}
            yield from self._pull(owners, data)
            groups = [data[formed.groups[i].ticket, formed.groups[i].attempt] for i in indices]
            if self._mask_age is not None:
                groups = mask_older(groups, formed.step - self._mask_age)
            self._learner.learn(formed, groups, indices, formed.step)
            for owner, keys in owners.items():
                self._courier.submit(self._release(owner, keys))

    def _pull(self, owners: dict[int, list[Key]], data: dict[Key, list[Trajectory]]) -> Iterator[None]:
        requests = {self._consumer.pull(owner, keys): owner for owner, keys in owners.items()}

        def arrived() -> bool:
            for request in list(requests):
                groups = self._take(request)
                if groups is not None:
                    data.update(trajectories_by_key(groups))
                    del requests[request]
            return not requests

        yield from until(arrived, self._wait_limit, lambda: f"groups from ranks {sorted(set(requests.values()))}")

    def _take(self, request: int) -> Groups | None:
        try:
            return self._consumer.take(request)
        except LostGroupsError as error:
            raise HeadraceError(
                f"{error} So the steps since the checkpoint can't be trained again as they were. Go on by --resume: "
                "the archive is read anew then, and what it lacks is generated again."
            ) from error

    def _release(self, owner: int, keys: list[Key]) -> Callable[[], None]:
        return lambda: self._courier.transport.send(owner, Release(keys))
