"""Prompts in, responses out, by the tokenizer of a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.comm.errors import ConfigError, DataError
from headrace.launcher.models import make_tiny_model
from headrace.ranks.config import TinyModelConfig
from headrace.rollout.config import DataConfig
from headrace.rollout.prompts import PromptEncoder
from headrace.rollout.task import Task

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
)


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a chat template, as instruction-tuned models have."""
    folder = tmp_path_factory.mktemp("byte")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>", "<turn>"])
    tokenizer.train_from_iterator(["ab ab ab"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=TEMPLATE).save_pretrained(
        folder
    )
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, TinyModelConfig(layers=1, hidden=8, heads=1, kv_heads=1), seed=0)
    return folder


def encoder(folder: Path, stop: list[str] | None = None, context: int = 256, **data: object) -> PromptEncoder:
    config = DataConfig.model_validate({"environment": "a:b", **data})
    return PromptEncoder(folder, config, stop or [], context, max_tokens=8)


def test_a_chat_prompt_has_system_message_template_and_the_turn_of_the_model(byte_folder: Path) -> None:
    chat = encoder(byte_folder, system="be brief", prompt="Q {question} {x}?")
    ids = chat.encode(Task("1+1"))
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert chat.decode(ids) == "[system]be brief[user]Q 1+1 {x}?[go]"


def test_messages_are_taken_as_they_are_and_keep_their_own_system_message(byte_folder: Path) -> None:
    chat = encoder(byte_folder, system="be brief", prompt="Q {question}")
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert chat.decode(chat.encode(Task(asked))) == "[system]be brief[user]a[assistant]b[user]c[go]"
    own = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    assert chat.decode(chat.encode(Task(own))) == "[system]s[user]a[go]"


def test_plain_text_is_fed_without_a_template(byte_folder: Path, tiny_folder: Path) -> None:
    for folder in (byte_folder, tiny_folder):
        plain = encoder(folder, context=64, chat=False, prompt="{question}=")
        assert plain.decode(plain.encode(Task("12+34"))) == "12+34="


@pytest.mark.parametrize("text", ["中文测试", "😀👩‍👩‍👧 ok", "a , b .  c\n\td", "é\u0301ñ"])
def test_text_of_any_script_comes_back_unchanged(byte_folder: Path, text: str) -> None:
    plain = encoder(byte_folder, chat=False)
    assert plain.decode(plain.encode(Task(text))) == text


def test_half_a_character_decodes_to_the_replacement_sign_and_special_tokens_to_nothing(byte_folder: Path) -> None:
    plain = encoder(byte_folder, chat=False)
    ids = plain.encode(Task("好😀")).tolist()
    assert plain.decode(ids[:5]) == "好\ufffd"
    assert plain.decode([*ids, *plain.stop_token_ids]) == "好😀"
    assert plain.decode([]) == ""


def test_stop_tokens_come_from_tokenizer_configs_and_rollout_stop(byte_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_folder, tmp_path / "copy")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    newline = int(encoder(byte_folder, chat=False).encode(Task("\n"))[0])
    assert encoder(folder, ["\n", "<turn>"]).stop_token_ids == tuple(sorted({0, 1, 7, 9, newline}))
    assert encoder(byte_folder).stop_token_ids == (0,)


@pytest.mark.parametrize("stop", ["two words", "^"])
def test_a_stop_text_that_is_not_one_known_token_is_refused(tiny_folder: Path, stop: str) -> None:
    with pytest.raises(ConfigError, match="isn't a single token"):
        encoder(tiny_folder, [stop], context=64, chat=False)


def test_a_prompt_fits_exactly_or_is_refused_with_its_words_and_the_numbers(tiny_folder: Path) -> None:
    plain = encoder(tiny_folder, context=18, chat=False)
    assert plain.encode(Task("1" * 10)).shape == (10,)
    with pytest.raises(DataError, match=r"'11111111111' has 11 tokens, but there is room for 10 .*18 .*8"):
        plain.encode(Task("1" * 11))
    with pytest.raises(ConfigError, match="nothing is left"):
        encoder(tiny_folder, context=8, chat=False)


def test_characters_without_a_token_are_named(tiny_folder: Path) -> None:
    with pytest.raises(DataError, match=r"'\?\^'"):
        encoder(tiny_folder, context=64, chat=False).encode(Task("1^2?"))


@pytest.mark.parametrize("chat", [False, True])
def test_what_is_no_text_is_refused(byte_folder: Path, chat: bool) -> None:
    question = [{"role": "user", "content": "ab\ud800"}] if chat else "ab\ud800"
    with pytest.raises(DataError, match=r"the prompt of the task 'ab\\ud800' has half a character in it, '\\ud800'"):
        encoder(byte_folder, chat=chat).encode(Task(question))


def test_an_empty_prompt_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(DataError, match="no tokens"):
        encoder(tiny_folder, context=64, chat=False).encode(Task(""))


def test_chat_needs_a_template_and_messages_and_system_need_chat(tiny_folder: Path, byte_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no chat template.*data\.chat=false"):
        encoder(tiny_folder, context=64)
    with pytest.raises(ConfigError, match=r"data\.system"):
        encoder(byte_folder, chat=False, system="s")
    with pytest.raises(DataError, match="list of chat messages"):
        encoder(byte_folder, chat=False).encode(Task([{"role": "user", "content": "a"}]))


def test_a_tokenizer_without_an_end_token_is_refused(byte_folder: Path, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_file=str(byte_folder / "tokenizer.json")).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-text token"):
        encoder(tmp_path, chat=False)


def test_a_folder_that_is_missing_or_holds_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        encoder(tmp_path / "nowhere")
    with pytest.raises(DataError, match="can't be loaded"):
        encoder(tmp_path)


def test_the_fingerprint_tells_tokenizers_apart_and_is_the_same_for_a_copy(byte_folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(byte_folder, tmp_path / "copy")
    assert encoder(copy).fingerprint() == encoder(byte_folder).fingerprint()
    (copy / "chat_template.jinja").write_text(TEMPLATE + " ")
    assert encoder(copy).fingerprint() != encoder(byte_folder).fingerprint()
