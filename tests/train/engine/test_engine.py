"""The torch engine on one rank against plain Hugging Face and PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import (
    CONFIGS,
    Folders,
    assert_close,
    assert_equal,
    denominators,
    make_engine,
    make_samples,
    train_steps,
    weighted_nll,
    whole_gradients,
    whole_weights,
)
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from headrace.comm.errors import DataError, HeadraceError
from headrace.train.attention import PACKED_ATTENTION
from headrace.train.batch import Denominators, LossOutput, PackedBatch, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.torch_engine import TorchTrainEngine


def hugging_face_logprobs(model: torch.nn.Module, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
    """Log-probs [T] of each sample, from one right-padded batch."""
    longest = max(len(sample.tokens) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = torch.from_numpy(sample.tokens)
        mask[row, : len(sample.tokens)] = 1
    logprobs = torch.log_softmax(model(input_ids=tokens, attention_mask=mask).logits.float(), dim=-1)
    found = logprobs[:, :-1].gather(2, tokens[:, 1:, None])[:, :, 0]
    found = torch.cat([torch.zeros(len(samples), 1), found], dim=1)
    return [row[: len(sample.tokens)] for row, sample in zip(found, samples, strict=True)]


def hugging_face_loss(model: torch.nn.Module, samples: Sequence[TrainSample]) -> torch.Tensor:
    """The loss `weighted_nll` over all samples."""
    terms = [
        (logprobs * torch.from_numpy(sample.loss_mask * sample.advantages)).sum()
        for logprobs, sample in zip(hugging_face_logprobs(model, samples), samples, strict=True)
    ]
    return -torch.stack(terms).sum() / denominators(samples).tokens


def hugging_face_gradients(folder: Path, samples: Sequence[TrainSample]) -> tuple[float, dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    loss = hugging_face_loss(model, samples)
    loss.backward()
    return float(loss.detach()), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_equal_hugging_face(folders: Folders, samples: list[TrainSample], family: str) -> None:
    found = make_engine(folders[family]).forward(samples)
    with torch.no_grad():
        expected = hugging_face_logprobs(AutoModelForCausalLM.from_pretrained(folders[family]), samples)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_gradients_equal_hugging_face(folders: Folders, samples: list[TrainSample], family: str) -> None:
    engine = make_engine(folders[family])
    stats = engine.forward_backward(samples, weighted_nll, denominators(samples), 0)
    loss, gradients = hugging_face_gradients(folders[family], samples)
    assert stats["loss"] == pytest.approx(loss, abs=1e-5)
    assert_close(whole_gradients(engine), gradients)


@pytest.mark.parametrize("budget", [1, 30, 64, 100, 10_000])
@pytest.mark.parametrize("turn", [0, 3])
def test_loss_and_gradients_dont_depend_on_the_packing(
    folders: Folders, samples: list[TrainSample], budget: int, turn: int
) -> None:
    expected, gradients = hugging_face_gradients(folders["tied"], samples)
    engine = make_engine(folders["tied"], micro_batch_tokens=budget)
    stats = engine.forward_backward(samples[turn:] + samples[:turn], weighted_nll, denominators(samples), 0)
    assert stats["loss"] == pytest.approx(expected, abs=1e-5)
    assert_close(whole_gradients(engine), gradients)


def test_two_calls_add_up(folders: Folders, samples: list[TrainSample]) -> None:
    engine = make_engine(folders["tied"], activation_checkpointing=True)
    counts = denominators(samples)
    first = engine.forward_backward(samples[:4], weighted_nll, counts, 0)
    second = engine.forward_backward(samples[4:], weighted_nll, counts, 0)
    expected, gradients = hugging_face_gradients(folders["tied"], samples)
    assert first["loss"] + second["loss"] == pytest.approx(expected, abs=1e-5)
    assert_close(whole_gradients(engine), gradients)
    engine.zero_grad()
    assert not any(gradient.any() for gradient in whole_gradients(engine).values())


def test_bfloat16_gradients_follow_float32(folders: Folders, samples: list[TrainSample]) -> None:
    _, gradients = hugging_face_gradients(folders["tied"], samples)
    engine = make_engine(folders["tied"], dtype="bfloat16")
    engine.forward_backward(samples, weighted_nll, denominators(samples), 0)
    for name, gradient in whole_gradients(engine).items():
        assert gradient.dtype == torch.float32
        assert float((gradient - gradients[name]).norm() / gradients[name].norm()) < 0.05, name


def test_the_loss_sees_logprobs_only_where_the_mask_is_set(folders: Folders, samples: list[TrainSample]) -> None:
    engine = make_engine(folders["tied"])
    everywhere = {sample.tokens.tobytes(): row for sample, row in zip(samples, engine.forward(samples), strict=True)}
    seen = 0

    def check(logprobs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch, _: Denominators) -> LossOutput:
        nonlocal seen
        parts = zip(
            *(
                column.detach().split(batch.starts.diff().tolist())
                for column in (batch.tokens.int(), batch.loss_mask, logprobs, entropy)
            ),
            strict=True,
        )
        for tokens, mask, found, spread in parts:
            expected = torch.from_numpy(everywhere[tokens.numpy().tobytes()])
            torch.testing.assert_close(found, expected * mask, rtol=1e-5, atol=1e-5)
            assert ((spread > 0) == (mask > 0)).all()
            seen += 1
        return LossOutput(logprobs.sum(), {})

    engine.forward_backward(samples, check, denominators(samples), 0)
    assert seen == len(samples)


def test_temperature_divides_the_logits(folders: Folders, samples: list[TrainSample]) -> None:
    config = TrainConfig(micro_batch_tokens=80)
    engine = TorchTrainEngine(
        folders["tied"], config, "float32", 10, torch.device("cpu"), None, 0, False, temperature=0.5
    )
    model = AutoModelForCausalLM.from_pretrained(folders["tied"])
    tokens = torch.from_numpy(samples[1].tokens).long()
    with torch.no_grad():
        everything = torch.log_softmax(model(input_ids=tokens[None]).logits[0] / 0.5, dim=-1)
    expected = everything[:-1].gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(engine.forward(samples[1:2])[0][1:], expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_steps_equal_hugging_face_with_torch_adamw(folders: Folders, samples: list[TrainSample], clip: float) -> None:
    engine = make_engine(folders["untied"], grad_clip=clip, eps=1e-3)
    model = AutoModelForCausalLM.from_pretrained(folders["untied"])
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-3)
    for step in range(4):
        turned = samples[step:] + samples[:step]
        hugging_face_loss(model, turned).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        engine.forward_backward(turned, weighted_nll, denominators(turned), step)
        assert engine.optim_step(step).grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert_close(whole_weights(engine), dict(model.named_parameters()), 1e-4)


def test_a_step_takes_the_rate_of_the_schedule_or_the_one_given(folders: Folders, samples: list[TrainSample]) -> None:
    engine = make_engine(folders["tied"], schedule="linear", warmup_steps=2)
    assert engine.optim_step(0).lr == pytest.approx(5e-3)
    assert engine.optim_step(9).lr == 0
    assert engine.optim_step(0, lr=0.25).lr == 0.25


def test_a_gradient_that_isnt_finite_names_the_step(folders: Folders, samples: list[TrainSample]) -> None:
    engine = make_engine(folders["tied"])
    before = whole_weights(engine)

    def broken(logprobs: torch.Tensor, *_: object) -> LossOutput:
        return LossOutput(logprobs.sum() * math.nan, {})

    engine.forward_backward(samples, broken, denominators(samples), 0)
    with pytest.raises(HeadraceError, match="optimizer step 17 isn't finite"):
        engine.optim_step(17)
    assert_equal(whole_weights(engine), before)


def test_samples_without_a_token_in_the_loss_change_nothing(folders: Folders, samples: list[TrainSample]) -> None:
    masked = make_samples([30], seed=5)
    masked[0].loss_mask[:] = 0
    engine, alone = make_engine(folders["tied"]), make_engine(folders["tied"])
    engine.forward_backward(samples + masked, weighted_nll, denominators(samples), 0)
    alone.forward_backward(samples, weighted_nll, denominators(samples), 0)
    assert_equal(whole_gradients(engine), whole_gradients(alone))
    assert engine.forward_backward(masked, weighted_nll, denominators(samples), 0) == {"loss": 0.0}
    assert engine.forward([]) == []


@pytest.mark.parametrize("family", ["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_has_the_names_and_bits_of_hugging_face_with_tied_weights_once(
    folders: Folders, family: str, dtype: str
) -> None:
    engine = make_engine(folders[family], dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=getattr(torch, dtype))
    exported = {weight.spec.name: weight for share in range(3) for weight in engine.export_weights(dtype, share, 3)}
    assert exported.keys() == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in exported) == (family == "untied")
    for name, tensor in model.named_parameters():
        spec, data = exported[name].spec, exported[name].data
        assert (spec.dtype, spec.shape, spec.nbytes) == (dtype, tuple(tensor.shape), data.nbytes)
        assert data.tobytes() == tensor.detach().flatten().view(torch.uint8).numpy().tobytes()


def test_shares_of_the_export_are_disjoint_and_about_equal(folders: Folders) -> None:
    engine = make_engine(folders["untied"])
    shares = [list(engine.export_weights("bfloat16", share, 3)) for share in range(3)]
    names = [weight.spec.name for share in shares for weight in share]
    sizes = [sum(weight.spec.nbytes for weight in share) for share in shares]
    assert len(names) == len(set(names)) == len(engine.weights)
    assert max(sizes) - min(sizes) <= 97 * 32 * 2


@pytest.mark.parametrize("family", ["tied", "qwen2"])
def test_a_saved_model_is_loaded_by_hugging_face(
    folders: Folders, samples: list[TrainSample], tmp_path: Path, family: str
) -> None:
    engine = make_engine(folders[family])
    train_steps(engine, samples, range(2))
    engine.save_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config._attn_implementation != PACKED_ATTENTION
    assert_equal({name: tensor.detach() for name, tensor in model.named_parameters()}, whole_weights(engine))


def test_saving_in_bfloat16_says_so(folders: Folders, tmp_path: Path) -> None:
    make_engine(folders["tied"], dtype="bfloat16").save_model(tmp_path / "model")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").dtype == torch.bfloat16


def test_a_model_for_which_there_is_no_space_is_one_paragraph_and_leaves_nothing(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    engine = make_engine(folders["tied"])
    monkeypatch.setattr("headrace.train.torch_engine.save_file", full)
    with pytest.raises(HeadraceError, match=r"The model folder .*reference can't be written: .*No space left"):
        engine.save_model(tmp_path / "reference")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_engine_ends_with_the_same_bits(
    folders: Folders, samples: list[TrainSample], tmp_path: Path, dtype: str
) -> None:
    options = {"dtype": dtype, "schedule": "cosine", "warmup_steps": 2}
    whole = make_engine(folders["tied"], **options)
    train_steps(whole, samples, range(6))
    first = make_engine(folders["tied"], **options)
    train_steps(first, samples, range(3))
    first.save_state(tmp_path)
    drawn = torch.rand(4)
    second = make_engine(folders["tied"], **options)
    second.forward_backward(samples, weighted_nll, denominators(samples), 0)
    second.load_state(tmp_path)
    assert torch.equal(torch.rand(4), drawn)
    train_steps(second, samples, range(3, 6))
    assert_equal(whole_weights(second), whole_weights(whole))
    for mine, theirs in zip(second.forward(samples), whole.forward(samples), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_two_saves_differ_and_each_equals_its_step(
    folders: Folders, samples: list[TrainSample], tmp_path: Path
) -> None:
    engine = make_engine(folders["tied"])
    states = []
    for step in range(2):
        train_steps(engine, samples, range(step, step + 1))
        (tmp_path / str(step)).mkdir()
        engine.save_state(tmp_path / str(step))
        states.append(whole_weights(engine))
    assert not torch.equal(states[0]["model.norm.weight"], states[1]["model.norm.weight"])
    for step in (1, 0):
        engine.load_state(tmp_path / str(step))
        assert_equal(whole_weights(engine), states[step])


def test_the_state_before_the_first_update_can_be_saved(
    folders: Folders, samples: list[TrainSample], tmp_path: Path
) -> None:
    fresh = make_engine(folders["tied"])
    fresh.save_state(tmp_path)
    used = make_engine(folders["tied"])
    train_steps(used, samples, range(2))
    used.load_state(tmp_path)
    train_steps(fresh, samples, range(2))
    train_steps(used, samples, range(2))
    assert_equal(whole_weights(used), whole_weights(fresh))


def test_resetting_the_optimizer_forgets_its_moments(folders: Folders, samples: list[TrainSample]) -> None:
    engine = make_engine(folders["tied"])
    train_steps(engine, samples, range(1))
    engine.reset_optimizer()
    before = whole_weights(engine)
    engine.optim_step(0)
    decayed = before["model.embed_tokens.weight"] * (1 - 1e-2 * 0.1)
    torch.testing.assert_close(whole_weights(engine)["model.embed_tokens.weight"], decayed)


def test_a_state_of_another_model_is_refused(folders: Folders, tmp_path: Path) -> None:
    make_engine(folders["tied"]).save_state(tmp_path)
    with pytest.raises(DataError, match=r"lacks master/lm_head.weight"):
        make_engine(folders["untied"]).load_state(tmp_path)


def test_a_state_with_missing_files_is_refused(folders: Folders, tmp_path: Path) -> None:
    engine = make_engine(folders["tied"])
    with pytest.raises(DataError, match="no complete set of engine files"):
        engine.load_state(tmp_path)
    engine.save_state(tmp_path)
    (tmp_path / "engine_00000_of_00001.safetensors").rename(tmp_path / "engine_00000_of_00002.safetensors")
    with pytest.raises(DataError, match="no complete set of engine files"):
        engine.load_state(tmp_path)


@pytest.mark.parametrize("content", [None, "{}", '{"model_type": "gpt2"}', "not json"])
def test_a_model_folder_that_cant_be_used_is_one_clear_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError, match="model"):
        make_engine(tmp_path)
