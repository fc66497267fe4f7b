"""Finding the answer in a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.rollout.answers import extract
from headrace.rollout.config import AnswerConfig

FIRST = AnswerConfig(extract="first_number")
LAST = AnswerConfig(extract="last_number")


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("The answer is 7.", "7", "7"),
        ("2 + 3 = 5", "2", "5"),
        ("5-3", "5", "3"),
        ("3 - -4", "3", "-4"),
        ("(3)-4", "3", "4"),
        ("x=-5", "-5", "-5"),
        ("\N{MINUS SIGN}1,024.50 euros", "-1024.50", "-1024.50"),
        ("+7 or 8", "7", "8"),
        ("1,2,3", "1", "3"),
        ("$1,000,000.00!", "1000000.00", "1000000.00"),
        ("12.", "12", "12"),
        ("1.2.3", "1.2", "1.2"),
        (".5 of it", ".5", ".5"),
        ("1e5 and 2E-3", "1e5", "2E-3"),
        ("H2O weighs 18", "18", "18"),
        ("答案是5。", "5", "5"),
        ("none at all", "", ""),
        ("", "", ""),
    ],
)
def test_numbers_are_found_and_written_plainly(text: str, first: str, last: str) -> None:
    assert extract(FIRST, text) == first
    assert extract(LAST, text) == last


@given(st.integers(), st.integers())
def test_any_two_integers_are_read_back_with_or_without_commas(a: int, b: int) -> None:
    text = f"I think {a:,}; or rather {b}."
    assert int(extract(FIRST, text)) == a
    assert int(extract(LAST, text)) == b


@given(st.text())
def test_what_is_found_in_any_text_is_a_number_or_nothing(text: str) -> None:
    for config in (FIRST, LAST):
        answer = extract(config, text)
        assert answer == "" or answer.isascii()
        if answer:
            float(answer)


def test_whole_text_is_stripped() -> None:
    assert extract(AnswerConfig(extract="whole"), "\n a b \t") == "a b"


def test_tag_gives_the_first_closed_tag_over_lines() -> None:
    tag = AnswerConfig(extract="tag")
    assert extract(tag, "so <answer>\n4\n2 </answer> and <answer>5</answer>") == "4\n2"
    assert extract(tag, "so <answer>42") == ""


def test_regex_gives_its_first_group() -> None:
    config = AnswerConfig(extract="regex", pattern=r"####\s*(\S+)|(none)")
    assert extract(config, "work #### 12 done") == "12"
    assert extract(config, "none") == ""
    assert extract(config, "nothing") == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"extract": "regex"}, "goes with"),
        ({"extract": "tag", "pattern": "(a)"}, "goes with"),
        ({"extract": "regex", "pattern": "abc"}, "needs a group"),
        ({"extract": "regex", "pattern": "(abc"}, "isn't a regular expression"),
    ],
)
def test_a_pattern_that_cannot_work_is_refused(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AnswerConfig.model_validate(settings)
