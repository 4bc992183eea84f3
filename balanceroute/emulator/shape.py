"""The size and the physics of an emulated cluster."""

from dataclasses import dataclass, field

from balanceroute.emulator.connectors import DEFAULT_LEASE_S, Connector
from balanceroute.engine import OutputLengths, Preemption, StepTimeModel
from balanceroute.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """How many workers there are and how they behave; times are modelled seconds.

    A URL has `ranks_per_url` decode ranks behind it (1: one server per rank, what vllm-ascend recommends);
    all decode ranks share one barrier. time_scale: real seconds per modelled second.
    transfers_beside_full: whether a decode rank begins a transfer while all its slots are in use, which vLLM does not.
    prefix_caching: whether prefillers skip the blocks that they have; prompt_tokens_details: whether answers say how
    many tokens that were.
    """

    prefillers: int = 1
    decoders: int = 2
    ranks_per_url: int = 1
    max_num_seqs: int = 8
    connector: Connector = Connector.MOONCAKE_V1
    model: str = "emulated"
    max_model_len: int = 32_768
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    block_size: int = 128
    decode_blocks: int = 4_096
    prefill_blocks: int = 8_192
    prefill_tokens_per_s: float = 50_000.0
    prefill_overhead_s: float = 0.01
    prefill_lanes: int = 1
    transfer_s: float = 0.005
    transfer_s_per_token: float = 1e-6
    transfers_beside_full: bool = False
    lease_s: float | None = None
    preemption: Preemption = Preemption.POP_LAST
    lengths: OutputLengths = field(default_factory=OutputLengths)
    stream_interval: int = 1
    prefix_caching: bool = False
    prompt_tokens_details: bool = False
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in (("connector", Connector), ("preemption", Preemption)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as error:
                accepted = ", ".join(kind)
                text = f"emulated cluster: {name} {getattr(self, name)!r}: accepted is {accepted}"
                raise ConfigError(text) from error
        for name in (
            "prefillers",
            "decoders",
            "ranks_per_url",
            "max_num_seqs",
            "max_model_len",
            "stream_interval",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"emulated cluster: {name} must be 1 or more, got {getattr(self, name)}")
        if self.decoders % self.ranks_per_url:
            raise ConfigError(
                f"emulated cluster: {self.decoders} decode ranks do not fill URLs of {self.ranks_per_url}"
            )

    @property
    def pin_lease_s(self) -> float:
        """How long a prefiller keeps pinned KV."""
        return DEFAULT_LEASE_S[self.connector] if self.lease_s is None else self.lease_s

    @property
    def context_tokens(self) -> int:
        """`max_model_len`, as far as the KV memory of one worker carries it."""
        blocks = min(self.decode_blocks, self.prefill_blocks)
        return min(self.max_model_len, blocks * self.block_size - 1)

    def transfer_for(self, tokens: int) -> float:
        """Seconds that the KV of so many tokens takes from prefiller to decoder."""
        return self.transfer_s + self.transfer_s_per_token * tokens
