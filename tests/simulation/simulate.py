"""Thousands of seeded fault schedules, and every order of events of small worlds. Run by `make simulate`.

    python tests/simulation/simulate.py                     10,000 seeds on all cores, then the small worlds
    python tests/simulation/simulate.py --seeds 500         fewer
    python tests/simulation/simulate.py --seed 1234         one seed again, event by event

A failing seed prints the shortest story that leads to a failure and the command that plays it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial

from worlds.playing import choices, play, story
from worlds.schedules import covered, live
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
    for name, text in LINES.items():
        print(f"{total[name]:>12,}  {text}")
    for name in sorted(name for name in total if name.startswith("policy")):
        print(f"{total[name]:>12,}  lives with {name}")
    print(f"{failures} of {count:,} seeds failed, {time.monotonic() - began:.0f} s", flush=True)
    return not failures


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
    args = parser.parse_args()
    if args.seed is not None:
        tell(args.seed)
    elif not try_seeds(args.first, args.seeds):
        sys.exit(1)


if __name__ == "__main__":
    main()
