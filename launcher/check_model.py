"""Whether a folder holds a model that the engines can load, before a single rank is started."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from headrace.comm.errors import DataError

FAMILIES = ("llama", "qwen2", "qwen3")
"""`model_type` of the Hugging Face models that the torch engine runs."""


def check_model_folder(folder: Path) -> None:
    """
    Raises:
        DataError: the folder is missing, incomplete, or of a family that isn't supported.
    """
    if not folder.is_dir():
        raise DataError(
            f"model.path: there is no folder {folder} (seen from {Path.cwd()}). Give a Hugging Face folder with "
            "config.json, *.safetensors and a tokenizer; `make model` fetches SmolLM2-135M-Instruct."
        )
    family = _family(folder)
    if family not in FAMILIES:
        raise DataError(
            f"model.path: {folder} holds a model of the family {family!r}; headrace trains {', '.join(FAMILIES)}."
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(f"model.path: {folder} has no *.safetensors file; convert the weights by `save_pretrained`.")
    for file in files:
        _check_weights(file)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer_config.json").is_file():
        raise DataError(
            f"model.path: {folder} has no tokenizer (tokenizer.json); copy the model's tokenizer files there."
        )


def _check_weights(file: Path) -> None:
    """Read the file's table of contents, which also tells whether the file is as long as it says."""
    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise DataError(
            f"model.path: {file} can't be read ({error}); it is cut off or damaged: get it again."
        ) from None


def _family(folder: Path) -> object:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"model.path: {folder} has no config.json, so it isn't a Hugging Face model folder.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"model.path: {folder}/config.json can't be read: {error}.") from None
    return config.get("model_type") if isinstance(config, dict) else None
