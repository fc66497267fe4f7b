"""The errors that end a job with one clear paragraph."""

from __future__ import annotations


class HeadraceError(Exception):
    """A mistake the user can mend, or a condition that ends the job on purpose.

    The message is one paragraph: what is wrong, where, and what to do. It is shown without a traceback.
    Every other exception is a defect and is shown with one.
    """


class ConfigError(HeadraceError):
    """The config can't be used: an unknown or missing key, a value out of range, roles that don't fit."""


class DataError(HeadraceError):
    """A prompts file, dataset, tokenizer or model folder can't be used."""


class WaitLimitError(HeadraceError):
    """A wait ran into its limit; the message names the ranks waited for and what each last said."""


class PeerLostError(HeadraceError):
    """A rank died or went silent."""
