"""The config of a job as its ranks see it: the sections `run`, `model`, `ranks`, `ledger` and `checkpoint` are
defined here; `weights`, `data`, `rollout`, `eval` and `train` beside the code that they steer."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from headrace.comm.config import Section, WeightsConfig
from headrace.ranks.tickets import Overdue
from headrace.rollout.config import DataConfig, EvalConfig, RolloutConfig
from headrace.train.config import TrainConfig


class RunConfig(Section):
    """The run as a whole."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is `runs/NAME` unless `run.dir` says otherwise."""

    dir: Path | None = None
    """The run folder. Relative paths start at the current folder."""

    seed: int = Field(0, ge=0)
    """Seed of everything random: order of the prompts, sampling, initial weights of a model made from nothing."""

    steps: int = Field(60, ge=1)
    """Optimizer steps to train. The run ends earlier only when `data.epochs` is used up."""

    deterministic: bool = False
    """Same bits from the same seed and the same world: random numbers keyed by (seed, ticket, sample, position), fixed
    decode slots, fixed shapes. With `ledger.max_staleness: 0` and `weights.publish_every: 1` the weights after every
    step are promised bit for bit; otherwise the timing of the ranks decides which version samples a token, so only the
    random numbers are fixed."""

    keep_samples: int = Field(8, ge=0)
    """Prompts with answers that are kept of every step, in `samples.jsonl`."""

    trace: bool = False
    """Write what the main thread of every rank does, and when, to the folder `trace` of the run; `headrace trace RUN`
    makes one file of it for https://ui.perfetto.dev."""

    wait_limit_s: float = Field(600.0, gt=0)
    """Longest wait for any other rank, in seconds; when it strikes the job ends and names the ranks waited for."""

    heartbeat_s: float = Field(1.0, gt=0)
    """Interval of the heartbeats between ranks, in seconds."""

    silence_limit_s: float = Field(120.0, gt=0)
    """A rank whose courier has said nothing for so long is taken for dead and the job ends, in seconds."""

    @model_validator(mode="after")
    def _silence_longer_than_heartbeat(self) -> Self:
        if self.silence_limit_s < 3 * self.heartbeat_s:
            raise ValueError("run.silence_limit_s must be at least 3 times run.heartbeat_s")
        return self

    @property
    def folder(self) -> Path:
        return self.dir if self.dir is not None else Path("runs") / self.name


class ModelConfig(Section):
    """The model that is trained."""

    path: Path | None = None
    """A Hugging Face folder (config.json, *.safetensors, tokenizer). Either this or `model.tiny`."""

    tiny: TinyModelConfig | None = None
    """Make a small character-level Llama from nothing instead of loading one."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of generation and of the training's forward and backward pass. The optimizer always keeps fp32
    master weights."""


class TinyModelConfig(Section):
    """A Llama with one token per character."""

    characters: str = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz"
    """The alphabet; every character is one token. Beginning and end of text and padding are added."""

    layers: int = Field(4, ge=1)
    """Decoder layers."""

    hidden: int = Field(128, ge=8)
    """Width of the residual stream."""

    heads: int = Field(4, ge=1)
    """Attention heads; must divide `hidden`."""

    kv_heads: int = Field(4, ge=1)
    """Key/value heads; must divide `heads`."""

    context: int = Field(64, ge=8)
    """Longest prompt plus response, in tokens."""

    tied: bool = True
    """Share the input embedding with the output layer."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError("model.tiny: heads must divide hidden, and kv_heads must divide heads")
        return self


class RanksConfig(Section):
    """How many ranks do what."""

    generators: int = Field(2, ge=1)
    """Ranks that generate. With `headrace run -n N` the trainers stay as configured and the rest generate."""

    trainers: int = Field(1, ge=1)
    """Ranks that train, data parallel."""

    placement: Literal["spread", "by_node"] = "spread"
    """`spread`: both roles on every node. `by_node`: whole nodes for one role, as far as the numbers allow."""

    threads: int = Field(1, ge=0)
    """Compute threads per rank; 0 takes the cores of the node divided by its ranks."""


class LedgerConfig(Section):
    """The bound on staleness and the size of a step."""

    max_staleness: float = Field(1.0, ge=0, le=64)
    """Largest age of a trained token, in publications: 0 is synchronous on-policy training; fractions are allowed
    and rounded up for the bound."""

    groups_per_step: int = Field(8, ge=1)
    """Groups (prompts) in one optimizer step."""

    overdue: Overdue = "wait"
    """What happens when a step could be trained but for groups that are due and unfinished. `wait`: they are waited
    for. `cut`: their unfinished samples end at once and are trained as truncated. `mask`: the step is trained without
    them; later, their tokens older than the bound are masked out of the loss. `drop`: they are given up, and counted
    with the reason `overdue`. All but `wait` need `max_staleness` > 0."""

    settle_by: Literal["group", "sample"] = "group"
    """What `overdue: drop` gives up: the whole group, or only the samples of it that aren't finished while the others
    are trained."""

    filter: Literal["none", "no_variance"] = "none"
    """`no_variance`: a group whose rewards are all equal teaches nothing to a group-relative advantage; it is dropped
    with the reason `no_variance` and another takes its place."""

    filter_cap: float = Field(4.0, gt=0)
    """Most groups that are filtered per step, in multiples of `groups_per_step`; beyond it they are trained as they
    are, so that a task which is too easy or too hard can't hold up the run for ever."""

    reissue_after_s: float = Field(60.0, gt=0)
    """A generator that has said nothing for so long is taken for lost, in seconds: its tickets are granted to others.
    Should it return, it goes on, and what it finishes meanwhile counts where it still can. After
    `run.silence_limit_s` the job ends. At least 3 times `run.heartbeat_s`."""

    @model_validator(mode="after")
    def _policies_fit(self) -> Self:
        if self.overdue != "wait" and self.max_staleness == 0:
            raise ValueError(
                f"ledger.overdue: {self.overdue} needs ledger.max_staleness > 0: at 0 every group is due at once"
            )
        if self.settle_by == "sample" and self.overdue != "drop":
            raise ValueError("ledger.settle_by: sample goes with ledger.overdue: drop, and only with it")
        return self

    @property
    def filtered_per_step(self) -> int:
        """Most groups without reward variance that are dropped per step."""
        return 0 if self.filter == "none" else max(1, round(self.filter_cap * self.groups_per_step))


class CheckpointConfig(Section):
    """What is kept so that a run can go on after it was ended."""

    every: int = Field(20, ge=0)
    """Optimizer steps between checkpoints; 0 writes none but the last."""

    keep: int = Field(2, ge=1)
    """How many checkpoints are kept."""

    archive: bool = True
    """Keep what is generated, and which groups every step trains, in the folder `archive` of the run until a checkpoint
    covers it. A run that goes on after a crash then repeats its steps since the checkpoint with the same groups, and
    generates nothing again that was finished. Without it these groups are generated anew. It takes about 13 bytes per
    token of all groups since the last checkpoint. While there is none yet, only groups that wait to be trained are
    kept: after a crash the run begins anew."""


class JobConfig(Section):
    """Everything a rank needs to know."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    ranks: RanksConfig = RanksConfig()
    ledger: LedgerConfig = LedgerConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def in_order(self) -> bool:
        """Step v trains tickets vB … vB + B - 1: the promise of equal bits needs it."""
        return self.run.deterministic and self.ledger.max_staleness == 0 and self.weights.publish_every == 1

    @property
    def goes_on_within_groups(self) -> bool:
        """A resumed run goes on in the middle of groups. Equal bits need whole ones; so does one version per sample."""
        return self.checkpoint.archive and not self.run.deterministic and self.rollout.partial

    @model_validator(mode="after")
    def _loss_is_later_than_some_heartbeats(self) -> Self:
        if self.ledger.reissue_after_s < 3 * self.run.heartbeat_s:
            raise ValueError(
                f"ledger.reissue_after_s ({self.ledger.reissue_after_s:g}) must be at least 3 times run.heartbeat_s "
                f"({self.run.heartbeat_s:g}): else a generator that is well is taken for lost between two heartbeats, "
                "and what it makes is granted again"
            )
        return self

    @model_validator(mode="after")
    def _filter_can_compare_and_replace(self) -> Self:
        if self.ledger.filter == "none":
            return self
        if self.rollout.group_size == 1:
            raise ValueError("ledger.filter: no_variance compares the rewards of a group; rollout.group_size is 1")
        if self.in_order:
            raise ValueError(
                "ledger.filter can't be used in a deterministic run at max_staleness 0: there every step trains fixed "
                "tickets, and a filtered one couldn't be replaced"
            )
        return self

    @model_validator(mode="after")
    def _model_and_data_go_with_the_engine(self) -> Self:
        sources = [self.model.path, self.model.tiny, self.data.environment, self.data.file]
        if self.rollout.engine == "latency":
            if any(source is not None for source in sources) or self.eval.tasks:
                raise ValueError(
                    "rollout.engine: latency makes up its own tasks; leave out model, data sources and eval"
                )
            return self
        if (self.model.path is None) == (self.model.tiny is None):
            raise ValueError("give either model.path (a Hugging Face folder) or model.tiny, not both or neither")
        if (self.data.environment is None) == (self.data.file is None):
            raise ValueError("give either data.environment or data.file, not both or neither")
        return self


ModelConfig.model_rebuild()
