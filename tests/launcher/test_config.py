"""Loading a config: values, overrides, and every kind of mistake told in one paragraph."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.errors import ConfigError
from headrace.launcher.config import Config, dump, load, validate
from headrace.launcher.describe import describe_config
from headrace.launcher.mistakes import key_paths, section_at
from headrace.launcher.yaml_files import parse_yaml
from headrace.ranks.config import RunConfig

TINY = "model: {tiny: {layers: 1}}\ndata: {environment: 'reasoning_gym:chain_sum'}\nrollout: {max_tokens: 8}\n"


def write(folder: Path, text: str) -> Path:
    file = folder / "config.yaml"
    file.write_text(text)
    return file


def mistake(folder: Path, text: str, *overrides: str) -> str:
    """The paragraph that loading ends with."""
    with pytest.raises(ConfigError) as error:
        load(write(folder, text), overrides)
    paragraph = str(error.value)
    assert "\n" not in paragraph
    return paragraph


def test_overrides_are_yaml(tmp_path: Path) -> None:
    overrides = ["train.lr=1e-5", "rollout.stop=[a, 'b c']", "data.epochs=null", "run.name=no", "train.warm_start={}"]
    config = load(write(tmp_path, TINY), [*overrides, "train.warm_start.steps=3", "launch.env.THREADS=2"])
    assert config.train.lr == 1e-5
    assert config.rollout.stop == ["a", "b c"]
    assert config.data.epochs is None
    assert config.run.name == "no"
    assert config.train.warm_start is not None
    assert config.train.warm_start.steps == 3
    assert config.launch.env == {"THREADS": "2"}


def test_an_override_makes_the_sections_above_it(tmp_path: Path) -> None:
    assert load(write(tmp_path, TINY + "train: null\n"), ["train.lr=0.5"]).train.lr == 0.5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr", "write key.path=value"),
        ("=3", "write key.path=value"),
        ("train..lr=3", "write key.path=value"),
        ("rollout.stop=[a", "override 'rollout.stop=[a'"),
        ("rollout.max_tokens.x=3", "rollout.max_tokens is a value, not a section"),
    ],
)
def test_a_bad_override_is_explained(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in mistake(tmp_path, TINY, override)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {stepss: 3}\n", "unknown key `run.stepss` (did you mean `run.steps`?)"),
        ("max_staleness: 3\n", "unknown key `max_staleness` (did you mean `ledger.max_staleness`?)"),
        ("rollout: {zzz: 3}\n", "unknown key `rollout.zzz` (known here: engine, group_size"),
        ("run: {steps: many}\n", "`run.steps` must be a whole number, but is 'many'"),
        ("run: {steps: 2.5}\n", "`run.steps` must be a whole number, but is 2.5"),
        ("run: {steps: 0}\n", "`run.steps` must be 1 or more, but is 0"),
        ("run: {name: a b}\n", "`run.name` must match ^[A-Za-z0-9][A-Za-z0-9._-]*$, but is 'a b'"),
        ("run: {name: null}\n", "`run.name` must be a text, but is empty"),
        ("rollout: {kv: x}\n", "`rollout.kv` must be 'keep' or 'recompute', but is 'x'"),
        ("rollout: {top_p: 2}\n", "`rollout.top_p` must be 1 or less, but is 2"),
        ("rollout: {memory_mb: 0}\n", "`rollout.memory_mb` must be more than 0, but is 0"),
        ("rollout: {memory_mb: .inf}\n", "`rollout.memory_mb` must be a finite number, but is"),
        ("rollout: {stop: a}\n", "`rollout.stop` must be a list, but is 'a'"),
        ("train: {betas: [0.9]}\n", "`train.betas.1` is missing"),
        (
            "train: {betas: [0.9, 0.9, 0.9]}\n",
            "`train.betas` must be a list of at most 2 values, but is [0.9, 0.9, 0.9]",
        ),
        ("data: {chat: maybe}\n", "`data.chat` must be true or false, but is 'maybe'"),
        ("data: {file: {a: 1}}\n", "`data.file` must be a path, but is a section with the keys a"),
        ("run: {heartbeat_s: 100}\n", "run.silence_limit_s must be at least 3 times run.heartbeat_s"),
        ("run: 3\n", "`run` must be a section with keys, but is 3"),
        ("run: null\n", "`run` must be a section with keys, but is empty"),
    ],
)
def test_a_mistake_names_the_key_and_what_was_expected(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in mistake(tmp_path, text)


def test_all_mistakes_stand_in_one_paragraph(tmp_path: Path) -> None:
    told = mistake(tmp_path, "run: {stepss: 3, seed: -1}\nledger: {groups_per_step: x}\n")
    assert "3 mistakes" in told
    assert all(key in told for key in ("run.stepss", "run.seed", "ledger.groups_per_step"))


def test_a_missing_source_of_data_is_told(tmp_path: Path) -> None:
    assert "data.environment or data.file" in mistake(tmp_path, "model: {tiny: {}}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {steps: 3\nmodel: x\n", "line 2"),
        ("run: {steps: 3, steps: 4}\n", "the key 'steps' is given twice"),
        ("- a\n- b\n", "it holds a list; a config has sections such as `run:`"),
        ("steps\n", "it holds a single value; a config has sections"),
        ("", "it is empty; a config has sections"),
    ],
)
def test_what_is_not_a_config_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in mistake(tmp_path, text)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml can't be read: No such file"):
        load(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_size=1", "`rollout.group_size` must be ≥ 2"),
        ("rollout.temperature=0", "`rollout.temperature` must be > 0"),
        ("rollout.max_tokens=64", "leave no room for a prompt"),
        ("run.heartbeat_s=30", "ledger.reissue_after_s (60) must be at least 3 times run.heartbeat_s (30): else"),
        ("ledger.reissue_after_s=2", "ledger.reissue_after_s (2) must be at least 3 times run.heartbeat_s (1): else"),
    ],
)
def test_sections_are_checked_against_each_other(tmp_path: Path, override: str, expected: str) -> None:
    assert expected in mistake(tmp_path, TINY, override)


def test_a_schedule_needs_steps_after_its_warm_up(tmp_path: Path) -> None:
    told = mistake(tmp_path, TINY, "train.schedule=linear", "train.warmup_steps=60")
    assert "`train.warmup_steps` (60) must be less than `run.steps` (60)" in told


def test_a_broadcast_of_what_has_changed_is_refused(tmp_path: Path) -> None:
    told = mistake(tmp_path, TINY, "weights.encoding=delta", "weights.transport=collective")
    assert "weights.encoding: delta needs weights.transport: mpi" in told


def test_a_broadcast_into_shared_memory_is_refused(tmp_path: Path) -> None:
    told = mistake(tmp_path, TINY, "weights.node_shared=true", "weights.transport=collective")
    assert "weights.node_shared needs weights.transport: mpi" in told


def test_a_group_of_one_is_fine_for_an_advantage_of_ones_own(tmp_path: Path) -> None:
    overrides = ["rollout.group_size=1", "train.advantage=mine.py:advantage"]
    assert load(write(tmp_path, TINY), overrides).rollout.group_size == 1


@pytest.mark.parametrize("describe", [describe_config, dump])
def test_a_printed_config_loads_back_to_the_same(tmp_path: Path, describe: Any) -> None:
    overrides = ["train.lr=1e-5", "rollout.stop=[a, '\\n']", "launch.env={A: '1'}", "data.options={min_terms: 2}"]
    config = load(write(tmp_path, TINY), overrides)
    assert load(write(tmp_path, describe(config))) == config


def test_every_key_has_a_documentation(tmp_path: Path) -> None:
    undocumented = []
    for path in key_paths(Config):
        *above, name = path.split(".")
        section = section_at(Config, above)
        assert section is not None
        field = section.model_fields[name]
        if not field.description and section_at(Config, path.split(".")) is None:
            undocumented.append(path)
    assert undocumented == []


def test_ranks_read_everything_but_the_launch_section(tmp_path: Path) -> None:
    config = load(write(tmp_path, TINY), ["run.seed=7"])
    assert set(Config.model_fields) - set(type(config.job()).model_fields) == {"launch"}
    assert config.job().run.seed == 7


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_of_any_notation_are_numbers(number: float) -> None:
    for text in (repr(number), f"{number:e}", f"{number:g}"):
        value = parse_yaml(text, "test")
        assert isinstance(value, (int, float))
        assert float(value) == float(text)


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text().filter(lambda key: key not in RunConfig.model_fields), ANY_VALUE, min_size=1))
def test_any_nonsense_in_a_section_ends_as_a_config_error(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^test: .*unknown key"):
        validate({"rollout": {"engine": "latency"}, "run": section}, "test")
