"""Thousands of seeded fault schedules, and every order of events of small worlds: `make simulate`.

    python tests/simulation/simulate.py                     10,000 seeds on all cores
    python tests/simulation/simulate.py --seeds 500         fewer
    python tests/simulation/simulate.py --seed 1234         one seed again, event by event
    python tests/simulation/simulate.py --search            every order of events of small worlds

A failing seed prints the shortest story that leads to a failure and the command that plays it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from worlds.playing import choices, play, story
from worlds.schedules import covered, live
from worlds.search import Found, Search
from worlds.setup import Setup
from worlds.smallest import ALL, MORE, QUICK, name
from worlds.world import World

LINES = {
    "seeds": "runs",
    "worlds": "lives of runs",
    "resumes": "resumed from a checkpoint",
    "stops": "asked to stop",
    "events": "events",
    "steps": "steps trained",
    "groups": "groups trained",
    "undone steps": "steps undone",
    "lives with little memory": "lives in which generators kept no more groups than they must",
    "dies": "generators died",
    "dies_deaf": "generators ended that a version never reached",
    "falls_silent": "generators taken for lost that went on",
    "returns": "heard again",
    "Forgotten": "told of forgotten asks",
    "skips": "versions skipped",
    "fails": "groups failed",
    "hangs": "rewards that hung",
    "Cut": "messages Cut",
    "Returned": "messages Returned",
    "Dropped": "messages Dropped",
    "dropped overdue": "groups dropped as overdue",
    "dropped no_variance": "groups filtered",
    "samples left out": "samples left out",
    "masked tokens": "tokens masked",
    "superseded": "reports superseded",
    "Redirect": "asks redirected",
    "lives that reached the bound": "lives whose oldest token reached the bound (none passed it)",
}
SHOWN_FAILURES = 3


def try_seed(seed: int) -> tuple[Counter[str], str]:
    """What a seed covered; how it failed, if it did."""
    try:
        worlds = play(partial(live, seed), seed)
    except AssertionError as error:
        return Counter(seeds=1), f"{error}\nagain: {sys.executable} tests/simulation/simulate.py --seed {seed}"
    return covered(worlds) + Counter(seeds=1), ""


def try_seeds(first: int, count: int) -> bool:
    """Try many seeds on all cores and print what they covered; True if none failed."""
    began, total, failures = time.monotonic(), Counter[str](), 0
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for found, failure in pool.imap_unordered(try_seed, range(first, first + count), chunksize=20):
            total += found
            failures += bool(failure)
            if failure and failures <= SHOWN_FAILURES:
                print(failure, flush=True)
    for what, text in LINES.items():
        print(f"{total[what]:>12,}  {text}")
    for policy in sorted(what for what in total if what.startswith("policy")):
        print(f"{total[policy]:>12,}  lives with {policy}")
    print(f"{failures} of {count:,} seeds failed, {time.monotonic() - began:.0f} s", flush=True)
    return not failures


def search(setup: Setup) -> tuple[str, Found | AssertionError]:
    """All states of a small world; how it failed, if it did."""
    try:
        return name(setup), Search(setup).run()
    except AssertionError as error:
        return name(setup), error


def search_all(setups: Sequence[Setup]) -> bool:
    """Search all these worlds on all cores, the largest first; True if none failed."""
    began, good = time.monotonic(), True
    with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
        for named, found in pool.imap_unordered(search, reversed(setups)):
            good &= isinstance(found, Found)
            told = f"{found.states:,} states, {found.events:,} events" if isinstance(found, Found) else found
            print(f"{named}: {told}", flush=True)
    print(f"{len(setups)} small worlds, {time.monotonic() - began:.0f} s", flush=True)
    return good


def tell(seed: int) -> None:
    """Play one seed again and print what happens in it."""
    worlds: list[World] = []
    try:
        live(seed, choices(seed), worlds)
    finally:
        for world in worlds:
            print(world.setup)
            print(story(world))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="only this one, event by event")
    parser.add_argument("--search", action="store_true", help="search small worlds instead")
    args = parser.parse_args()
    if args.seed is not None:
        tell(args.seed)
    elif not (search_all([*QUICK, *ALL, *MORE]) if args.search else try_seeds(args.first, args.seeds)):
        sys.exit(1)


if __name__ == "__main__":
    main()
