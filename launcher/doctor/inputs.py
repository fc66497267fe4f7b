"""The config, and whether what it names can be read without a network."""

from __future__ import annotations

from headrace.launcher.check_data import check_data_of_ranks
from headrace.launcher.config import Config
from headrace.launcher.doctor.findings import Finding, ok
from headrace.launcher.start import check_inputs


def check_config(config: Config, source: str) -> Finding:
    """It was read; what it asks for, in short."""
    ranks = config.ranks
    asked = f"{ranks.generators} generators, {ranks.trainers} trainers, engine {config.rollout.engine}"
    return ok("config", f"{source} is valid: {config.run.steps} steps, {asked}")


def check_model(config: Config) -> Finding:
    """
    Raises:
        HeadraceError: the model's folder, or another file that the config names, can't be used.
    """
    check_inputs(config)
    return ok("model", f"{config.model.path or 'made by the run'}: can be read")


def check_data(config: Config) -> Finding:
    """
    Raises:
        HeadraceError: tasks, tokenizer or rewards can't be used, in a process like a rank, without a network.
    """
    check_data_of_ranks(config)
    return ok(
        "data",
        "tasks and tokenizer load offline" if config.model.path or config.model.tiny else "made up by the engine",
    )
