"""The torch engine against Hugging Face's own models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from headrace.comm.errors import DataError
from headrace.rollout.architecture import read_architecture
from headrace.rollout.torch_engine import TorchEngine, load_torch_engine

from .conftest import CONTEXT
from .engine_tools import Sample, collect, hf_logits, hf_logprobs, hf_model, prompts, request, run

CPU = torch.device("cpu")


def engine_of(folder: Path, slots: int = 4, **options: object) -> TorchEngine:
    return load_torch_engine(folder, "float32", CPU, slots, **options)  # type: ignore[arg-type]


def test_greedy_tokens_and_logprobs_of_a_ragged_batch_equal_hugging_face(any_model_folder: Path) -> None:
    engine, model = engine_of(any_model_folder), hf_model(any_model_folder)
    batch = prompts(7)
    for i, prompt in enumerate(batch):
        engine.add(request(i, prompt, max_tokens=5 + i))
    samples = run(engine)
    for i, prompt in enumerate(batch):
        config = GenerationConfig(max_new_tokens=5 + i, do_sample=False, pad_token_id=0)
        tokens = torch.tensor(prompt[None].astype(np.int64))
        expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)[0]
        assert samples[i].tokens == expected[len(prompt) :].tolist()
        np.testing.assert_allclose(samples[i].logprobs, hf_logprobs(model, prompt, samples[i].tokens), atol=1e-4)
        assert samples[i].finish == "length"


def test_sampled_logprobs_are_those_of_the_distribution_sampled_from(llama_folder: Path) -> None:
    """Every request of the batch has its own temperature; the reference is one full forward pass by Hugging Face."""
    engine, model = engine_of(llama_folder, slots=8), hf_model(llama_folder)
    batch = prompts(8, seed=1)
    for i, prompt in enumerate(batch):
        engine.add(request(i, prompt, temperature=0.5 + 0.25 * i))
    for i, sample in run(engine).items():
        assert isinstance(i, int)
        tokens = [*batch[i].tolist(), *sample.tokens]
        logprobs = (hf_logits(model, tokens) / (0.5 + 0.25 * i)).log_softmax(-1)[len(batch[i]) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs, expected.numpy(), atol=1e-4)


def test_samples_of_a_group_share_their_prompt_and_differ(llama_folder: Path) -> None:
    engine, model = engine_of(llama_folder, slots=8), hf_model(llama_folder)
    prompt = prompts(1, longest=10)[0]
    for i in range(6):
        engine.add(request(i, prompt, temperature=1.0))
    engine.add(request(6, prompts(1, seed=3)[0]))
    samples = run(engine)
    assert len({tuple(samples[i].tokens) for i in range(6)}) > 1
    for i in range(6):
        np.testing.assert_allclose(samples[i].logprobs, hf_logprobs(model, prompt, samples[i].tokens), atol=1e-4)


def test_a_prompt_is_computed_once_for_all_samples_admitted_together(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(llama_folder, slots=8)
    computed: list[int] = []
    forward = engine._model.forward
    monkeypatch.setattr(engine._model, "forward", lambda t, *rest: (computed.append(len(t)), forward(t, *rest))[1])
    prompt = np.arange(20, dtype=np.int32)
    for i in range(8):
        engine.add(request(i, prompt))
    engine.step()
    engine.step()
    assert computed == [20, 8]


def test_more_requests_than_slots_are_all_served_in_order(llama_folder: Path) -> None:
    engine = engine_of(llama_folder, slots=3)
    for i, prompt in enumerate(prompts(10)):
        engine.add(request(i, prompt, max_tokens=3 + i % 4))
    started: list[object] = []
    samples: dict[object, Sample] = {}
    while engine.capacity().waiting or engine.capacity().running:
        chunks = engine.step()
        assert len(chunks) <= 3
        started += [chunk.id for chunk in chunks if chunk.id not in samples]
        collect(samples, chunks)
    assert started == list(range(10))
    assert [len(samples[i].tokens) for i in range(10)] == [3 + i % 4 for i in range(10)]


def test_a_stop_token_ends_the_response_and_is_part_of_it(llama_folder: Path) -> None:
    prompt = prompts(1)[0]
    engine = engine_of(llama_folder)
    engine.add(request(0, prompt))
    free = run(engine)[0].tokens
    stop = free[4]
    engine.add(request(1, prompt, stop_token_ids=(stop, 500)))
    stopped = run(engine)[1]
    assert stopped.tokens == free[: free.index(stop) + 1]
    assert stopped.finish == "stop"


def test_abort_forgets_running_and_waiting_requests_and_leaves_the_others_alone(llama_folder: Path) -> None:
    model = hf_model(llama_folder)
    engine = engine_of(llama_folder, slots=3)
    batch = prompts(6, seed=4)
    for i, prompt in enumerate(batch):
        engine.add(request(i, prompt))
    samples: dict[object, Sample] = {}
    for _ in range(4):
        collect(samples, engine.step())
    for id in (0, 5, "never there"):
        engine.abort(id)
    capacity = engine.capacity()
    assert (capacity.slots, capacity.running, capacity.waiting) == (3, 2, 2)
    run(engine, samples)
    assert len(samples[0].tokens) == 4
    assert 5 not in samples
    for i in (1, 2, 3, 4):
        assert len(samples[i].tokens) == 12
        np.testing.assert_allclose(samples[i].logprobs, hf_logprobs(model, batch[i], samples[i].tokens), atol=1e-4)


def test_nothing_to_do_is_an_empty_step(llama_folder: Path) -> None:
    assert engine_of(llama_folder).step() == []


def test_a_request_that_does_not_fit_the_context_is_refused(llama_folder: Path) -> None:
    engine = engine_of(llama_folder)
    prompt = np.zeros(CONTEXT - 11, np.int32)
    engine.add(request("fits", prompt[1:]))
    with pytest.raises(DataError, match=rf"prompt of {CONTEXT - 11} tokens .*max_tokens 12 .*context of {CONTEXT}"):
        engine.add(request("too long", prompt))
    assert len(run(engine)["fits"].tokens) == 12
    with pytest.raises(DataError, match="context of 20"):
        engine_of(llama_folder, max_context=20).add(request(0, prompt[:9]))


@pytest.mark.parametrize("tokens", [[], [97], [-1]])
def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(llama_folder: Path, tokens: list[int]) -> None:
    with pytest.raises(DataError):
        engine_of(llama_folder).add(request(0, np.array(tokens, np.int32)))


def test_bfloat16_stays_close_to_float32(llama_folder: Path) -> None:
    engine, model = load_torch_engine(llama_folder, "bfloat16", CPU, 4), hf_model(llama_folder)
    batch = prompts(4, seed=5)
    for i, prompt in enumerate(batch):
        engine.add(request(i, prompt, temperature=1.0))
    for i, sample in run(engine).items():
        assert isinstance(i, int)
        gaps = np.array(sample.logprobs) - hf_logprobs(model, batch[i], sample.tokens)
        assert 0 < np.abs(gaps).mean() < 0.25


def test_a_model_in_several_files_is_read_by_its_index(llama_folder: Path, tmp_path: Path) -> None:
    hf_model(llama_folder).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    samples = []
    for folder in (llama_folder, tmp_path):
        engine = engine_of(folder)
        engine.add(request(0, np.arange(5, dtype=np.int32)))
        samples.append(run(engine)[0])
    assert samples[0] == samples[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_response_that_was_begun_elsewhere_goes_on_as_if_it_hadnt_been_interrupted(
    llama_folder: Path, deterministic: bool
) -> None:
    """Equal prompts with different beginnings are admitted together, beside one that begins anew."""
    batch = prompts(4, seed=4)
    batch[1] = batch[0]
    whole = engine_of(llama_folder, deterministic=deterministic)
    for i, prompt in enumerate(batch):
        whole.add(request(i, prompt, temperature=1.0))
    expected = run(whole)
    engine = engine_of(llama_folder, deterministic=deterministic)
    begun = [5, 3, 0, 11]
    for i, prompt in enumerate(batch):
        engine.add(replace(request(i, prompt, temperature=1.0), begun=tuple(expected[i].tokens[: begun[i]])))
    for i, sample in run(engine).items():
        assert isinstance(i, int)
        assert sample.tokens == expected[i].tokens[begun[i] :]
        np.testing.assert_allclose(sample.logprobs, expected[i].logprobs[begun[i] :], atol=1e-5)
        assert sample.finish == "length"


def test_tokens_that_the_model_doesnt_know_are_refused_in_what_was_begun(llama_folder: Path) -> None:
    with pytest.raises(DataError, match="has token 5000"):
        engine_of(llama_folder).add(replace(request(0, prompts(1)[0]), begun=(1, 5000)))


def test_attention_catches_up_with_the_weights_at_its_length(llama_folder: Path) -> None:
    """Multiplications with the matrices of the layers, and those of causal attention: queries with keys, weights with
    values."""
    arch = read_architecture(llama_folder)
    engine = load_torch_engine(llama_folder, "float32", torch.device("cpu"), 1)
    matrices = [m for name, m in engine._model.parameters.items() if ".layers." in name and m.ndim == 2]
    weights = sum(matrix.numel() for matrix in matrices)
    length = arch.attention_length
    attention = arch.layers * sum(2 * arch.heads * arch.head_dim * (position + 1) for position in range(length))
    assert attention == pytest.approx(weights * length, rel=0.02)
