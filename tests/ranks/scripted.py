"""Parts of a generator that do what a test says: engine, weights, tasks and rewards."""

from __future__ import annotations

from collections import deque

import numpy as np

from headrace.comm.weights import Version
from headrace.rollout.engine import Capacity, Chunk
from headrace.rollout.rewards import Scored
from headrace.rollout.task import Task

PROMPT = 3


class Engine:
    """One token per step for each of `slots` requests; a response is `lengths[ticket, sample]` tokens long, or as
    long as `usual`."""

    def __init__(self, slots, lengths, delay=0, usual=5):
        self.slots, self.lengths, self.delay = slots, lengths, delay
        self.version, self.coming, self.usual = 0, [], usual
        self.running, self.waiting, self.begun = {}, deque(), {}

    def add(self, request):
        self.waiting.append(request.id)
        self.begun[request.id] = len(request.begun)

    def abort(self, id):
        if self.running.pop(id, None) is None and id in self.waiting:
            self.waiting.remove(id)

    def capacity(self):
        return Capacity(self.slots, len(self.running), len(self.waiting))

    def load_weights(self, version, tensors, lasting=False):
        self.coming.append([self.delay, version])
        self.come_into_force()

    def come_into_force(self):
        self.version = max([self.version, *(version for left, version in self.coming if left <= 0)])
        self.coming = [[left - 1, version] for left, version in self.coming if left > 0]

    def step(self):
        self.come_into_force()
        while self.waiting and len(self.running) < self.slots:
            id = self.waiting.popleft()
            self.running[id] = self.begun.pop(id)
        chunks = []
        for id in list(self.running):
            self.running[id] = made = self.running[id] + 1
            over = made == self.lengths.get((id.ticket, id.sample), self.usual)
            if over:
                del self.running[id]
            chunks.append(Chunk(id, (made,), (-made / 10,), self.version, "stop" if over else None))
        return chunks


class Subscriber:
    def __init__(self):
        self.version = None

    @property
    def waiting(self):
        return self.version is not None

    def take(self):
        version, self.version = self.version, None
        return None if version is None else Version(version, [], lambda: None)


class Tasks:
    held_out = ()
    stop_token_ids = ()

    def task(self, ticket):
        return Task(question=f"task {ticket}")

    def encode(self, task):
        return np.full(PROMPT, 7, np.int32)

    def decode(self, tokens):
        return " ".join(map(str, tokens))


class Scorer:
    """The number of tokens as reward; fails for `failing` tickets; holds everything back while `held`."""

    def __init__(self):
        self.ready, self.held, self.failing = [], False, set()

    def submit(self, key, task, text):
        failed = key.ticket in self.failing
        self.ready.append(Scored(key, None if failed else float(len(text.split())), 1, "bad" if failed else None, "x"))

    def poll(self):
        if self.held:
            return []
        ready, self.ready = self.ready, []
        return ready
