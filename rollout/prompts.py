"""From a task to token ids and from token ids to text, by the tokenizer of the model folder."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.comm.errors import ConfigError, DataError
from headrace.rollout.config import DataConfig
from headrace.rollout.task import Task


class PromptEncoder:
    """Encodes prompts and decodes responses.

    `folder` is a Hugging Face folder, `stop` are the texts of `rollout.stop`, `context` is the longest sequence of the
    model and `max_tokens` the longest response, both in tokens.

    Raises:
        DataError: no usable tokenizer in the folder, or one without an end token.
        ConfigError: `data.chat` without a chat template, `data.system` without `data.chat`, or a stop text that isn't
            a single token.
    """

    def __init__(self, folder: Path, data: DataConfig, stop: list[str], context: int, max_tokens: int) -> None:
        self._folder, self._data = folder, data
        self._tokenizer = _load_tokenizer(folder)
        self._room = context - max_tokens
        self._limits = f"context of {context} − rollout.max_tokens of {max_tokens}"
        if self._room < 1:
            raise ConfigError(f"rollout.max_tokens: nothing is left for the prompt ({self._limits} = {self._room}).")
        self._check_chat()
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({*self._end_tokens(), *map(self._single_token, stop)}))
        """Any of these ends a response: the tokenizer's end token, those of the model's configs, and `rollout.stop`."""

    def encode(self, task: Task) -> npt.NDArray[np.int32]:
        """The prompt of a task as int32 [P], P ≥ 1, ready to be continued.

        Raises:
            DataError: empty, too long for context − max_tokens, with characters the tokenizer has no token for, or no
                Unicode text.
        """
        _check_unicode(task)
        ids = self._chat_ids(task) if self._data.chat else self._plain_ids(task)
        if not ids:
            raise DataError(f"the prompt of the task {_first_words(task)} has no tokens.")
        if self._tokenizer.unk_token_id in ids:
            self._refuse_unknown(task)
        if len(ids) > self._room:
            raise DataError(
                f"the prompt of the task {_first_words(task)} has {len(ids)} tokens, but there is room for "
                f"{self._room} ({self._limits}). Shorten it, lower rollout.max_tokens or take out the task."
            )
        return np.asarray(ids, dtype=np.int32)

    def encode_response(self, text: str) -> list[int]:
        """The tokens of a whole response as the model should give it: the text, then the end token."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, self._tokenizer.eos_token_id]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of some tokens, special ones left out; bytes that aren't whole UTF-8 characters become U+FFFD."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)
        return text

    def fingerprint(self) -> str:
        """A hash over vocabulary, chat template and stop tokens: ranks with the same tokenizer agree in it."""
        facts = [sorted(self._tokenizer.get_vocab().items()), self._tokenizer.chat_template, self.stop_token_ids]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def _chat_ids(self, task: Task) -> list[int]:
        ids: list[int] = self._tokenizer.apply_chat_template(
            self._messages(task), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return ids

    def _messages(self, task: Task) -> list[dict[str, str]]:
        """Chat messages as they come, or the question in its template; `data.system` first unless there is one."""
        if isinstance(task.question, str):
            messages = [{"role": "user", "content": self._data.prompt.replace("{question}", task.question)}]
        else:
            messages = task.question
        if self._data.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self._data.system}, *messages]

    def _plain_ids(self, task: Task) -> list[int]:
        if not isinstance(task.question, str):
            raise DataError(f"the task {_first_words(task)} is a list of chat messages, which needs data.chat: true.")
        ids: list[int] = self._tokenizer(self._data.prompt.replace("{question}", task.question))["input_ids"]
        return ids

    def _check_chat(self) -> None:
        if self._data.chat and not self._tokenizer.chat_template:
            raise ConfigError(
                f"data.chat: the tokenizer in {self._folder} has no chat template. "
                f"Set data.chat=false to feed the plain prompt, or use an instruction-tuned model."
            )
        if self._data.system is not None and not self._data.chat:
            raise ConfigError("data.system: a system message needs data.chat: true.")

    def _end_tokens(self) -> set[int]:
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"the tokenizer in {self._folder} has no end-of-text token (eos_token in tokenizer_config.json), "
                f"so no response could ever end. Add one, or use another model folder."
            )
        return {end, *_configured_ends(self._folder / "generation_config.json", self._folder / "config.json")}

    def _single_token(self, text: str) -> int:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
            raise ConfigError(
                f"rollout.stop: {text!r} isn't a single token of the tokenizer in {self._folder}; "
                f"it becomes {self._tokenizer.convert_ids_to_tokens(ids)}."
            )
        return ids[0]

    def _refuse_unknown(self, task: Task) -> None:
        """Raise unless the "unknown" token is in the prompt because the text spells it out."""
        text = task.question if isinstance(task.question, str) else "".join(m["content"] for m in task.question)
        alien = sorted(char for char in set(text) if self._tokenizer.unk_token_id in self._tokenizer(char)["input_ids"])
        if alien:
            raise DataError(
                f"the prompt of the task {_first_words(task)} has characters that the tokenizer in {self._folder} has "
                f"no token for: {''.join(alien)!r}."
            )


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise DataError(f"model.path: there is no folder {folder}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, clean_up_tokenization_spaces=False
        )
    except Exception as error:  # whatever the tokenizer's code raises, the folder is what has to be mended
        raise DataError(f"model.path: the tokenizer in {folder} can't be loaded: {error}") from error
    tokenizer.model_max_length = sys.maxsize  # `encode` refuses what is too long; the tokenizer would only warn
    return tokenizer


def _configured_ends(*files: Path) -> set[int]:
    """The `eos_token_id`s, one number or a list, of Hugging Face config files, where they exist."""
    ends: set[int] = set()
    for file in files:
        if file.is_file():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            ends.update(value if isinstance(value, list) else [] if value is None else [value])
    return ends


def _check_unicode(task: Task) -> None:
    texts = [task.question] if isinstance(task.question, str) else [m["content"] for m in task.question]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"the prompt of the task {_first_words(task)} has half a character in it, {half!r}.") from None


def _first_words(task: Task) -> str:
    """A task as it's named in messages."""
    text = task.question if isinstance(task.question, str) else task.question[-1]["content"]
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
