"""`run.deterministic` over real ranks: the bits of a plain synchronous loop, also through a crash."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import check_books, merged, metrics_of, run_job, start_job
from tiny import assert_same_bits, kill_after, tiny_config

from headrace.comm.trajectory import Trajectory, Unit
from headrace.launcher.models import make_tiny_model
from headrace.ranks.config import JobConfig
from headrace.ranks.tasks import environment_of, make_encoder, ticket_order
from headrace.rollout.answers import extract
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.engines import make_engine
from headrace.train.objective import build_samples, denominators_of, make_objective
from headrace.train.torch_engine import TorchTrainEngine


class Reference:
    """Synchronous training in one process: generate, score, train, load the new weights; no ranks, no ledger."""

    def __init__(self, tree: dict[str, Any], folder: Path) -> None:
        torch.set_num_threads(1)
        tree = merged(tree, {"model": {"tiny": None, "path": str(folder / "model")}})
        self.config = config = JobConfig.model_validate(tree)
        tiny = JobConfig.model_validate(tiny_config()).model.tiny
        assert tiny is not None
        make_tiny_model(folder / "model", tiny, config.run.seed)
        self.environment, self.encoder = environment_of(config), make_encoder(config)
        self.order = ticket_order(config, len(self.environment.tasks))
        longest = max(len(self.encoder.encode(task)) for task in self.environment.tasks) + config.rollout.max_tokens
        self.rollout = make_engine(config.rollout, config.model.path, "float32", "cpu", 0, True, longest)
        assert config.model.path is not None
        device = torch.device("cpu")
        self.train = TorchTrainEngine(config.model.path, config.train, "float32", 5, device, None, 3, True)
        self.objective = make_objective(config.train)

    def run(self, steps: int, folder: Path) -> None:
        for step in range(steps):
            self.rollout.load_weights(step, self.train.export_weights("float32", 0, 1))
            size = self.config.ledger.groups_per_step
            groups = self.generate(range(step * size, (step + 1) * size))
            samples = build_samples(groups, self.config.train, range(size))
            denominators = denominators_of(samples, self.config.rollout.max_tokens)
            self.train.forward_backward(samples, self.objective, denominators, step)
            self.train.optim_step(step)
        folder.mkdir()
        self.train.save_state(folder)

    def generate(self, tickets: range) -> list[list[Trajectory]]:
        params = SamplingParams(self.config.rollout.max_tokens, stop_token_ids=tuple(self.encoder.stop_token_ids))
        made: dict[Unit, tuple[list[int], list[float]]] = {}
        for ticket in tickets:
            prompt = self.encoder.encode(self.task(ticket))
            for sample in range(self.config.rollout.group_size):
                unit = Unit(ticket, sample, 0)
                made[unit] = ([], [])
                self.rollout.add(Request(unit, prompt, params, (self.config.run.seed, ticket, sample)))
        running = len(made)
        while running:
            for chunk in self.rollout.step():
                assert isinstance(chunk.id, Unit)
                made[chunk.id][0].extend(chunk.tokens)
                made[chunk.id][1].extend(chunk.logprobs)
                running -= chunk.finish is not None
        units = range(self.config.rollout.group_size)
        return [[self.trajectory(Unit(t, s, 0), *made[Unit(t, s, 0)]) for s in units] for t in tickets]

    def task(self, ticket: int) -> Any:
        return self.environment.tasks[self.order.task(ticket)]

    def trajectory(self, unit: Unit, tokens: list[int], logprobs: list[float]) -> Trajectory:
        task = self.task(unit.ticket)
        prompt = self.encoder.encode(task)
        blank = np.zeros(len(prompt))
        answer = extract(self.config.data.answer, self.encoder.decode(tokens))
        return Trajectory(
            unit=unit,
            tokens=np.concatenate([prompt, tokens]).astype(np.int32),
            loss_mask=np.concatenate([blank, np.ones(len(tokens))]).astype(np.uint8),
            logprobs=np.concatenate([blank, logprobs]).astype(np.float32),
            versions=np.concatenate([blank - 1, np.zeros(len(tokens))]).astype(np.int32),
            reward=float(self.environment.reward(task, answer)),
            finish="",
        )


@pytest.mark.parametrize(
    ("generators", "weights"),
    [
        (1, {"encoding": "delta"}),
        (3, {"node_shared": True}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(2, {"transport": "collective"}, marks=pytest.mark.slow),
        pytest.param(4, {"node_shared": True, "encoding": "delta", "verify": True}, marks=pytest.mark.slow),
    ],
)
def test_s0_equals_a_plain_synchronous_loop_bit_for_bit(tmp_path, generators, weights):
    """Staleness 0 trains, and equals the synchronous result."""
    tree = tiny_config(ranks={"generators": generators}, train={"warm_start": None}, weights=weights)
    metrics, _ = run_job(tree, tmp_path)
    check_books(metrics, 0)
    assert max(line["reward/mean"] for line in metrics) > 0, "a reward of 0 everywhere would train nothing"
    Reference(tree, tmp_path).run(5, tmp_path / "reference")
    assert_same_bits(tmp_path / "runs/job/checkpoints/step_000005", tmp_path / "reference")


@pytest.mark.parametrize(("trainers", "victim"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 0)])
def test_a_killed_job_resumes_to_the_weights_of_an_uninterrupted_one(tmp_path, trainers, victim):
    train = {"schedule": "cosine", "warmup_steps": 3}
    tree = tiny_config(run={"steps": 40}, ranks={"trainers": trainers}, checkpoint={"every": 5}, train=train)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    run_job(tree, tmp_path / "whole")
    job = start_job(tree, tmp_path / "killed")
    kill_after(job, tmp_path / "killed", 12, victim)
    began = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert job.returncode == 128 + signal.SIGKILL, output
    assert f"Rank {victim} was ended by signal 9" in output
    metrics, _ = run_job(tree, tmp_path / "killed", "--resume")
    check_books(metrics, 0)
    assert len(metrics) == 40
    last = "runs/job/checkpoints/step_000040"
    assert_same_bits(tmp_path / "whole" / last, tmp_path / "killed" / last)
    whole = metrics_of(tmp_path / "whole")
    assert len({line["train/lr"] for line in whole}) > 35, "a rate that doesn't change would hide a shifted schedule"
    for name in ("reward/mean", "train/lr", "tickets/trained", "response_length/mean"):
        assert [line[name] for line in metrics] == [line[name] for line in whole], name


def test_after_a_crash_at_s2_every_ticket_is_accounted_for(tmp_path):
    tree = tiny_config(
        run={"steps": 40, "deterministic": False},
        ranks={"trainers": 2},
        ledger={"max_staleness": 2},
        checkpoint={"every": 5},
    )
    job = start_job(tree, tmp_path)
    kill_after(job, tmp_path, 12, 3)
    job.communicate(timeout=60)
    metrics, _ = run_job(tree, tmp_path, "--resume")
    check_books(metrics, 2)
    assert [metrics[-1][f"tickets/{name}"] for name in ("issued", "trained", "outstanding")] == [160, 160, 0]
