"""How the answer is found in the text of a response."""

from __future__ import annotations

import re
from collections.abc import Iterator

from headrace.rollout.config import AnswerConfig

_NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9_])             # not inside a name or another number: the 2 of H2O is none
    (?<![0-9]\.)                  # nor the tail of 1.2.3
    (?P<sign>(?<![)\]])[-+−])?    # a sign stands apart from what is before it: 5-3 is 5 and 3
    (?P<digits>
        [0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?    # 1,234,567.8
      | [0-9]+(?:\.[0-9]+)?                               # 1234.5
      | \.[0-9]+                                          # .5
    )
    (?P<exponent>[eE][-+]?[0-9]+(?![A-Za-z0-9_]))?
    """,
    re.VERBOSE,
)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract(config: AnswerConfig, text: str) -> str:
    """The answer in `text`, stripped; "" where there is none, and the reward gives its verdict on that.

    Numbers come out without thousands commas and without a plus, with an ASCII minus, otherwise as written:
    "−1,024.50" gives "-1024.50".
    """
    match config.extract:
        case "whole":
            return text.strip()
        case "first_number":
            return next(_numbers(text), "")
        case "last_number":
            return ["", *_numbers(text)][-1]
        case "tag":
            return _first_group(_TAG, text)
        case "regex":
            assert config.pattern is not None, "the config asks for a pattern with regex"
            return _first_group(re.compile(config.pattern), text)


def _numbers(text: str) -> Iterator[str]:
    """All numbers of the text, in order, in the form `extract` promises."""
    for match in _NUMBER.finditer(text):
        sign = "-" if match["sign"] in ("-", "−") else ""
        yield sign + match["digits"].replace(",", "") + (match["exponent"] or "")


def _first_group(pattern: re.Pattern[str], text: str) -> str:
    """The first group of the first match; a group that took no part in the match counts as empty."""
    match = pattern.search(text)
    return (match[1] or "").strip() if match else ""
