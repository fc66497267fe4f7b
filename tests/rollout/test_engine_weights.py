"""Changing the weights of the torch engine between two steps: what a token's label says is what sampled it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from headrace.comm.errors import DataError
from headrace.comm.weights import Slab, TensorSpec, WeightTensor, pack, unpack
from headrace.rollout.torch_engine import TorchEngine, load_torch_engine

from .conftest import make_folder
from .engine_tools import Sample, collect, folder_weights, hf_logprobs, hf_model, prompts, request, run

CPU = torch.device("cpu")
SWITCH = 5
"""Tokens sampled before the weights change."""


def engine_of(folder: Path, kv: Literal["keep", "recompute"] = "keep", deterministic: bool = False) -> TorchEngine:
    return load_torch_engine(folder, "float32", CPU, 4, kv, deterministic)


def sample_across_a_switch(engine: TorchEngine, new: Path) -> tuple[list[np.ndarray], dict[object, Sample]]:
    """Six requests for four slots; the weights become version 3 after five steps."""
    batch = prompts(6, seed=2)
    for i, prompt in enumerate(batch):
        engine.add(request(i, prompt, temperature=1.0))
    samples: dict[object, Sample] = {}
    for _ in range(SWITCH):
        collect(samples, engine.step())
    engine.load_weights(3, folder_weights(new))
    return batch, run(engine, samples)


@pytest.mark.parametrize("deterministic", [False, True])
def test_with_recomputed_keys_every_token_has_the_logprob_of_the_version_on_its_label(
    llama_folder: Path, other_llama_folder: Path, deterministic: bool
) -> None:
    engine = engine_of(llama_folder, "recompute", deterministic)
    batch, samples = sample_across_a_switch(engine, other_llama_folder)
    models = {0: hf_model(llama_folder), 3: hf_model(other_llama_folder)}
    assert engine.version == 3
    mixed = 0
    for i, prompt in enumerate(batch):
        sample = samples[i]
        by_version = {version: hf_logprobs(model, prompt, sample.tokens) for version, model in models.items()}
        labelled = [by_version[version][t] for t, version in enumerate(sample.versions)]
        mislabelled = [by_version[3 - version][t] for t, version in enumerate(sample.versions)]
        np.testing.assert_allclose(sample.logprobs, labelled, atol=1e-4)
        assert np.abs(np.subtract(sample.logprobs, mislabelled)).min() > 1e-4
        mixed += len(set(sample.versions)) == 2
    assert mixed >= 1


def test_with_kept_keys_the_next_token_has_old_keys_and_the_new_query(
    llama_folder: Path, other_llama_folder: Path
) -> None:
    """Before the switch everything is the old model's; after it a model of its own: Hugging Face continues its cache
    of the old weights by the new model."""
    batch, samples = sample_across_a_switch(engine_of(llama_folder), other_llama_folder)
    old, new = hf_model(llama_folder), hf_model(other_llama_folder)
    for i in range(4):
        prompt, sample = batch[i], samples[i]
        assert sample.versions == [0] * SWITCH + [3] * (12 - SWITCH)
        before = hf_logprobs(old, prompt, sample.tokens)[:SWITCH]
        np.testing.assert_allclose(sample.logprobs[:SWITCH], before, atol=1e-4)
        with torch.inference_mode():
            cached = [*prompt.tolist(), *sample.tokens[: SWITCH - 1]]
            cache = old(torch.tensor([cached]), use_cache=True).past_key_values
            rest = torch.tensor([sample.tokens[SWITCH - 1 : -1]])
            logprobs = new(rest, cache=cache).logits[0].log_softmax(-1)
        after = logprobs.gather(1, torch.tensor(sample.tokens[SWITCH:])[:, None])[:, 0]
        np.testing.assert_allclose(sample.logprobs[SWITCH:], after.numpy(), atol=1e-4)


def test_an_engine_agrees_with_hugging_face_after_an_update(any_model_folder: Path, tmp_path: Path) -> None:
    """Fused projections, biases, norms and a tied output layer all end up in their places."""
    engine = engine_of(any_model_folder)
    model = hf_model(any_model_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    engine.load_weights(1, folder_weights(tmp_path))
    prompt = prompts(1)[0]
    engine.add(request(0, prompt))
    sample = run(engine)[0]
    np.testing.assert_allclose(sample.logprobs, hf_logprobs(model, prompt, sample.tokens), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_weights_of_another_float_format_are_converted(
    llama_folder: Path, other_llama_folder: Path, dtype: torch.dtype
) -> None:
    engine = engine_of(llama_folder)
    engine.load_weights(1, folder_weights(other_llama_folder, dtype))
    model = hf_model(other_llama_folder)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    prompt = prompts(1)[0]
    engine.add(request(0, prompt))
    sample = run(engine)[0]
    np.testing.assert_allclose(sample.logprobs, hf_logprobs(model, prompt, sample.tokens), atol=1e-4)


def wrong_shape(tensors: list[WeightTensor]) -> list[WeightTensor]:
    spec = replace_shape(tensors[-1].spec, (*tensors[-1].spec.shape[:-1], 1))
    return [*tensors[:-1], WeightTensor(spec, tensors[-1].data)]


def replace_shape(spec: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, shape)


def missing(tensors: list[WeightTensor]) -> list[WeightTensor]:
    return tensors[:-1]


def unknown(tensors: list[WeightTensor]) -> list[WeightTensor]:
    return [*tensors, WeightTensor(TensorSpec("model.extra", "float32", (1,)), np.zeros(4, np.uint8))]


def integers(tensors: list[WeightTensor]) -> list[WeightTensor]:
    spec = tensors[-1].spec
    return [*tensors[:-1], WeightTensor(TensorSpec(spec.name, "int32", spec.shape), tensors[-1].data)]


def too_few_bytes(tensors: list[WeightTensor]) -> list[WeightTensor]:
    return [*tensors[:-1], replace(tensors[-1], data=tensors[-1].data[:-4])]


@pytest.mark.parametrize("spoil", [wrong_shape, missing, unknown, integers, too_few_bytes])
def test_weights_that_do_not_fit_leave_the_old_ones_in_force(
    llama_folder: Path, other_llama_folder: Path, spoil: object
) -> None:
    assert callable(spoil)
    engine = engine_of(llama_folder)
    with pytest.raises(DataError):
        engine.load_weights(1, spoil(list(folder_weights(other_llama_folder))))
    assert engine.version == 0
    prompt = prompts(1)[0]
    engine.add(request(0, prompt))
    sample = run(engine)[0]
    assert sample.versions == [0] * 12
    np.testing.assert_allclose(sample.logprobs, hf_logprobs(hf_model(llama_folder), prompt, sample.tokens), atol=1e-4)


def test_a_tied_output_layer_may_come_along_or_not(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama", tied=True)
    engine = engine_of(folder)
    tensors = list(folder_weights(folder))
    assert "lm_head.weight" not in {tensor.spec.name for tensor in tensors}
    embedding = next(tensor for tensor in tensors if tensor.spec.name == "model.embed_tokens.weight")
    copy = WeightTensor(TensorSpec("lm_head.weight", "float32", embedding.spec.shape), embedding.data)
    engine.load_weights(1, iter([*tensors, copy]))
    engine.load_weights(2, iter(tensors))
    assert engine.version == 2


def in_one_buffer(folder: Path, slab: Slab) -> list[WeightTensor]:
    """The tensors of a folder as they arrive, in the order in which the model has them."""
    tensors = {tensor.spec.name: tensor for tensor in folder_weights(folder)}
    names = [name for name, _ in hf_model(folder).named_parameters()]
    share = pack((tensors[name] for name in names), slab, verify=False)
    return unpack(share.manifest.specs, share.data)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_lasting_weights_are_used_where_they_are_and_never_written(tmp_path: Path, family: str, tied: bool) -> None:
    folders = [make_folder(tmp_path / str(n), family, tied=tied, seed=n) for n in range(3)]
    slabs = [Slab() for _ in folders]
    first, second = (in_one_buffer(folder, slab) for folder, slab in zip(folders[1:], slabs[1:], strict=True))
    engine = engine_of(folders[0])
    batch = prompts(3)

    engine.load_weights(1, first, lasting=True)
    assert sample_all(engine, batch) == sample_all(engine_of(folders[1]), batch)
    there = {view.data_ptr() for view in engine._model.parameters.values()}
    lent = {tensor.data.ctypes.data for tensor in first}
    assert len(there & lent) >= len(there) * (0.5 if family == "qwen2" else 1.0), "weights were copied"
    sent = [tensor.data.copy() for tensor in first]
    engine.load_weights(2, second)
    assert sample_all(engine, batch) == sample_all(engine_of(folders[2]), batch)
    assert not {view.data_ptr() for view in engine._model.parameters.values()} & {t.data.ctypes.data for t in second}
    for tensor, before in zip(first, sent, strict=True):
        np.testing.assert_array_equal(tensor.data, before)


def sample_all(engine: TorchEngine, batch: list[np.ndarray]) -> list[list[int]]:
    for i, prompt in enumerate(batch):
        engine.add(request(i, prompt, temperature=1.0))
    samples = run(engine)
    return [samples[i].tokens for i in range(len(batch))]


def test_the_engine_keeps_no_reference_to_the_incoming_buffers(llama_folder: Path, other_llama_folder: Path) -> None:
    engine = engine_of(llama_folder)
    buffers: list[np.ndarray] = []

    def tensors() -> Iterator[WeightTensor]:
        for tensor in folder_weights(other_llama_folder):
            buffers.append(tensor.data.copy())
            yield WeightTensor(tensor.spec, buffers[-1])

    engine.load_weights(1, tensors())
    for buffer in buffers:
        buffer[:] = 255
    prompt = prompts(1)[0]
    engine.add(request(0, prompt))
    sample = run(engine)[0]
    model = hf_model(other_llama_folder)
    np.testing.assert_allclose(sample.logprobs, hf_logprobs(model, prompt, sample.tokens), atol=1e-4)
