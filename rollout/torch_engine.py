"""The inference engine for any torch device: continuous batching over a KV cache with exact log-probs.

    add ──▶ waiting ──admit──▶ running ──▶ forward ──▶ sample ──▶ chunks
                                  ▲                                 │
                                  └──── until stop or max_tokens ◀──┘

One step is one forward pass over packed tokens: the newest token of every running sequence, and the whole prompts of
those just admitted. Samples that share a prompt and are admitted together compute it once. In deterministic mode a
step is several passes of fixed shape instead: all slots over the whole context, then each new prompt by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.comm.errors import DataError
from headrace.comm.weights import WeightTensor, joined
from headrace.rollout.architecture import read_architecture
from headrace.rollout.engine import Capacity, Chunk, Request
from headrace.rollout.kv_cache import CachedAttention, KVCache, Prompt, rounded
from headrace.rollout.random import stream_of, uniforms
from headrace.rollout.sampling import sample
from headrace.rollout.slots import CompactSlots, FixedSlots, Sequence, Slots
from headrace.rollout.transformer import InPlace, Transformer

PROMPT_TOKENS = 4096
"""No more than this many prompt tokens are computed in one pass, unless a single prompt is longer."""

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float8_e4m3fn")}

ROW = np.dtype(
    [
        ("token", np.int64),  # the newest, not cached yet
        ("position", np.int64),  # of the newest token
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("stream", np.uint64),  # of the random numbers
    ]
)
IDLE = np.array((0, 0, 1.0, 0, 1.0, 0), ROW)


class TorchEngine:
    """See the module's docstring and the `Engine` protocol."""

    def __init__(
        self,
        model: Transformer,
        slots: int,
        kv: Literal["keep", "recompute"] = "keep",
        deterministic: bool = False,
        group_size: int = 1,
    ) -> None:
        """`group_size` places the samples of consecutive tickets in different slots in deterministic mode."""
        self.version = 0
        self._model = model
        self._kv = kv
        self._deterministic = deterministic
        self._slots: Slots = CompactSlots(slots)
        self._waiting: deque[Sequence] = deque()
        self._known: dict[Hashable, Sequence] = {}
        self._rows = np.full(slots, IDLE, ROW)
        self._cache = KVCache(model.arch, slots, model.dtype, model.device)
        if deterministic:
            self._slots = FixedSlots(slots, lambda request: request.key[1] * group_size + request.key[2])
            self._cache.reserve(model.arch.context)

    def add(self, request: Request) -> None:
        if request.id in self._known:
            raise ValueError(f"a request with the id {request.id!r} is already there")
        self._check_request(request)
        sequence = Sequence(request)
        self._known[request.id] = sequence
        self._waiting.append(sequence)

    @torch.inference_mode()
    def abort(self, id: Hashable) -> None:
        sequence = self._known.pop(id, None)
        if sequence is None:
            return
        if sequence.slot < 0:
            self._waiting.remove(sequence)
        else:
            self._release(sequence.slot)

    def capacity(self) -> Capacity:
        return Capacity(self._slots.size, len(self._slots.running), len(self._waiting))

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        width = self._slots.decode_width()
        groups = self._admit()
        if not self._slots.running:
            return []
        slots, logits = self._next_logits(width, groups)
        rows = self._rows[slots]
        uniform = uniforms(rows["stream"], rows["position"] + 1)
        tokens, logprobs = sample(logits, rows["temperature"], rows["top_k"], rows["top_p"], uniform)
        chunks = [
            self._record(self._slots.running[slot], token, logprob)
            for slot, token, logprob in zip(slots.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
            if slot in self._slots.running
        ]
        self._retire(chunks)
        return chunks

    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Iterable[WeightTensor], lasting: bool = False) -> None:
        """See `Engine`. Any floating-point format is taken and converted; raises `DataError` on a mismatch."""
        incoming = list(tensors)
        self._model.check({tensor.spec.name: tensor.spec.shape for tensor in incoming})
        views = {tensor.spec.name: as_torch(tensor) for tensor in incoming}
        self._model.load(views, in_place({tensor.spec.name: tensor for tensor in incoming}) if lasting else None)
        self.version = version
        if self._kv == "recompute":
            self._recompute()

    def _check_request(self, request: Request) -> None:
        prompt, longest, context = request.prompt, request.params.max_tokens, self._model.arch.context
        if not len(prompt) or longest < 1:
            raise DataError(
                f"Request {request.id!r} has {len(prompt)} prompt tokens and max_tokens {longest}: both must be ≥ 1."
            )
        if len(prompt) + longest > context:
            raise DataError(
                f"A prompt of {len(prompt)} tokens plus rollout.max_tokens {longest} is longer than the context of "
                f"{context} tokens (request {request.id!r}). Shorten the prompt, lower rollout.max_tokens, or take a "
                "model with a longer context."
            )
        highest = max([int(prompt.max()), *request.begun])
        if min([int(prompt.min()), *request.begun]) < 0 or highest >= self._model.arch.vocabulary:
            raise DataError(
                f"The prompt of request {request.id!r} has token {highest}, but the model knows "
                f"{self._model.arch.vocabulary}. The tokenizer doesn't belong to this model."
            )

    def _admit(self) -> list[list[Sequence]]:
        """Give slots to waiting sequences, in order; return the new ones, grouped by equal prompts."""
        groups: dict[tuple[int, ...], list[Sequence]] = {}
        held: list[Sequence] = []
        budget = PROMPT_TOKENS
        while self._waiting and len(self._slots.running) < self._slots.size:
            sequence = self._waiting.popleft()
            prompt = tuple(sequence.tokens)
            cost = 0 if prompt in groups else len(sequence.tokens)
            if cost > budget and groups:
                self._waiting.appendleft(sequence)
                break
            if self._slots.place(sequence):
                groups.setdefault(prompt, []).append(sequence)
                budget -= cost
                self._start(sequence)
            else:
                held.append(sequence)
        self._waiting.extendleft(reversed(held))
        return list(groups.values())

    def _start(self, sequence: Sequence) -> None:
        """Fill in the row of a sequence that has just got its slot."""
        p, stream = sequence.request.params, stream_of(sequence.request.key)
        last = len(sequence.tokens) - 1
        self._rows[sequence.slot] = (sequence.tokens[last], last, p.temperature, p.top_k, p.top_p, stream)
        self._cache.reserve(sequence.limit)

    def _next_logits(self, width: int, groups: list[list[Sequence]]) -> tuple[npt.NDArray[np.int64], Tensor]:
        """Logits [n, vocabulary] of the next token, and the slots [n] they are for: those below `width`, which hold
        cached sequences, and those of the new groups."""
        if not self._deterministic:
            return self._pass_over(width, groups)
        logits = torch.zeros((self._slots.size, self._model.arch.vocabulary), device=self._model.device)
        passes: list[tuple[int, list[list[Sequence]]]] = [(width, [])] if width else []
        passes += [(0, [group]) for group in groups]
        for part in passes:
            slots, values = self._pass_over(*part)
            logits[torch.from_numpy(slots).to(logits.device)] = values
        return np.arange(self._slots.size), logits

    def _pass_over(self, width: int, groups: list[list[Sequence]]) -> tuple[npt.NDArray[np.int64], Tensor]:
        """One forward pass; returns as `_next_logits`."""
        hidden, ends = self._forward(width, [(group[0].tokens, group) for group in groups])
        copies = [1] * width + [len(group) for group in groups]
        logits = self._model.logits(hidden[ends])
        if max(copies) > 1:
            logits = logits.repeat_interleave(torch.tensor(copies, device=logits.device), 0)
        new = [sequence.slot for group in groups for sequence in group]
        return np.concatenate((np.arange(width), np.array(new, np.int64))), logits

    def _forward(self, width: int, prompts: list[tuple[list[int], list[Sequence]]]) -> tuple[Tensor, Tensor]:
        """Hidden states [T, hidden] of packed tokens: the newest ones of the slots below `width`, then the tokens of
        each prompt, to be cached for its sequences. Also the index [n] of the last token of each of these parts."""
        rows, device = self._rows[:width], self._model.device
        packed, positions, spans, ends = [rows["token"]], [rows["position"]], [], list(range(width))
        start = width
        for tokens, sequences in prompts:
            stop = start + len(tokens)
            packed.append(np.array(tokens))
            positions.append(np.arange(len(tokens)))
            slots = torch.tensor([sequence.slot for sequence in sequences], device=device)
            spans.append(Prompt(start, stop, slots))
            ends.append(stop - 1)
            start = stop
        where = torch.from_numpy(np.concatenate(positions)).to(device)
        attention = CachedAttention(self._cache, where[:width], self._span(width), spans)
        hidden = self._model.forward(torch.from_numpy(np.concatenate(packed)).to(device), where, attention)
        return hidden, torch.tensor(ends, device=device)

    def _span(self, width: int) -> int:
        """How far into the cache a decode step looks."""
        if self._deterministic:
            return self._model.arch.context
        return rounded(int(self._rows["position"][:width].max(initial=0)) + 1)

    def _record(self, sequence: Sequence, token: int, logprob: float) -> Chunk:
        """Append a sampled token."""
        sequence.tokens.append(token)
        row = self._rows[sequence.slot]
        row["token"] = token
        row["position"] += 1
        finish: Literal["stop", "length", None] = None
        if token in sequence.request.params.stop_token_ids:
            finish = "stop"
        elif len(sequence.tokens) == sequence.limit:
            finish = "length"
        return Chunk(sequence.request.id, (token,), (logprob,), self.version, finish)

    def _retire(self, chunks: list[Chunk]) -> None:
        """Free the slots of finished sequences, the last first: what moves into a hole is never a finished one."""
        finished = [self._known.pop(chunk.id).slot for chunk in chunks if chunk.finish]
        for slot in sorted(finished, reverse=True):
            self._release(slot)

    def _release(self, slot: int) -> None:
        source = self._slots.release(slot)
        if source is None:
            self._rows[slot] = IDLE
        else:
            self._rows[slot] = self._rows[source]
            self._rows[source] = IDLE
            self._cache.move(source, slot, int(self._rows[slot]["position"]))

    def _recompute(self) -> None:
        """Fill the cache of every running sequence with the keys and values of the present weights."""
        batch: list[tuple[list[int], list[Sequence]]] = []
        for sequence in self._slots.running.values():
            cached = sequence.tokens[:-1]
            if not cached:
                continue
            if batch and (self._deterministic or sum(len(t) for t, _ in batch) + len(cached) > PROMPT_TOKENS):
                self._forward(0, batch)
                batch = []
            batch.append((cached, [sequence]))
        if batch:
            self._forward(0, batch)


def in_place(tensors: Mapping[str, WeightTensor]) -> InPlace:
    """Finds tensors that lie one behind the other."""

    def find(names: Iterable[str]) -> Tensor | None:
        parts = [tensors[name] for name in names]
        data, formats = joined(parts), {part.spec.dtype for part in parts}
        if data is None or len(formats) > 1 or not data.flags.writeable:  # torch has no read-only tensors
            return None
        return torch.from_numpy(data).view(DTYPES[formats.pop()])

    return find


def as_torch(tensor: WeightTensor) -> Tensor:
    """A view of the bytes as a tensor of the spec's format and shape.

    Raises:
        DataError: the format isn't a floating-point one, or the number of bytes is wrong.
    """
    spec, data = tensor.spec, tensor.data
    if spec.dtype not in DTYPES or data.nbytes != spec.nbytes:
        raise DataError(
            f"The weight {spec.name} came as {data.nbytes} bytes of {spec.dtype}; wanted are {list(spec.shape)} "
            f"numbers in one of the formats {', '.join(DTYPES)}."
        )
    writable = data if data.flags.writeable else data.copy()  # torch has no read-only tensors and warns of them
    return torch.from_numpy(writable).view(DTYPES[spec.dtype]).view(spec.shape)


def load_torch_engine(
    folder: Path,
    dtype: str,
    device: torch.device,
    slots: int,
    kv: Literal["keep", "recompute"] = "keep",
    deterministic: bool = False,
    group_size: int = 1,
    max_context: int | None = None,
) -> TorchEngine:
    """An engine with the weights of a Hugging Face folder, as version 0.

    `max_context` shortens the model's context, in tokens; in deterministic mode all of the context is computed in every
    step and held in memory for every slot.
    """
    arch = read_architecture(folder)
    arch = replace(arch, context=min(arch.context, max_context or arch.context))
    model = Transformer(arch, DTYPES[dtype], device)
    with torch.inference_mode():
        model.load_folder(folder)
    return TorchEngine(model, slots, kv, deterministic, group_size)
