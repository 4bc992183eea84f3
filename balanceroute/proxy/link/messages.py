"""The protocol between relays and the brain: all messages. `VERSION` counts its changes.

A frame is four bytes of length, big-endian, and one msgpack array of messages, each an array that begins with its
number. A side sends all messages of one turn of its loop as one frame: to wake the other process costs more than the
messages. So a message that nothing waits for (`Began`; `Finish`, while no request waits for a slot) goes with the next
one, or alone after `SOON_S`. A brain on the same machine reads the tokens of streams from shared memory
(`token_counts.py`); to others a relay sends them within `PROGRESS_S`, in one message for all its streams.

    relay                                      brain
      |-- Hello(version, relay, epoch, ...) ------>|   its name and the requests that it holds
      |<-- Welcome(version, epoch, member) --------|   or Farewell(reason), and the connection is closed
      |-- Submit, Prefilled, ..., Progress ------->|
      |<-- Chosen, Refused, Seen ------------------|
      |-- Judged, Activity, Learned, ... --------->|   how requests fared at workers
      |<-- Workers, Silent ------------------------|   the workers and their states
      |-- Beat ----------------------------------->|   both ways, while there is nothing else to send
      |<-- Beat -----------------------------------|

**Numbers for requests.** A relay numbers its tickets; ids cross once, in `Submit` or `Held`. Tokens of a ticket are
sums since `Submit`, or since the Hello with it, so to read or send one twice does no harm. `turn` numbers the calls of
a ticket that ask for an answer; its arrival is 1. An answer carries the turn of its call, so one that has crossed a
later call is dropped.

**Epochs.** Each leadership of a brain has a number, larger than all before. A relay never joins a brain with a smaller
one: its Hello has the largest that it has seen, and a brain with a smaller one no longer leads. A membership has a
number as well (`member`): if a relay was given up as dead, messages on its old connection are not read, and it has to
send Hello again.

**Workers** are judged by the brain, by its health checks and by relays' reports on their requests. Relays hold the
connections, and get every change of a worker's state. The first `Workers` of a membership names all workers.

**Between machines** the same frames go over TCP and TLS (`far.py`, `reach.py`). There a relay's name is
PROCESS@RUN-FOLDER, and a brain that drains sends these relays Farewell. A relay that ends regularly sends Farewell,
too, so that the log can tell it from a lost one.

Times are durations (`_s`, before the message was written), because the clocks of two machines differ.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from balanceroute.core.types import Outcome, RequestSpec, Standing, WorkerSpec, WorkerState
from balanceroute.core.view import ClusterView
from balanceroute.errors import BalanceRouteError
from balanceroute.proxy.admission.decider import RefusalKind
from balanceroute.proxy.perimeter.key_use import KeyUse

VERSION: Final = 12
FAR: Final = "@"  # only in names of relays of other machines, before the run folder's name
MAX_EPOCH: Final = 2**48  # accepted from a peer: epochs begin at seconds since 1970 at most, and frames carry 2**64
PROGRESS_S: Final = 0.005
SOON_S: Final = 0.05  # the longest delay of a message that nothing waits for: about a decode step
BEAT_S: Final = 1.0
SILENT_S: Final = 5.0  # a silent process is given up after this time; the death of one is noticed at once
HEAD_BYTES: Final = 4  # the header of a frame: the length of its body
MAX_FRAME_BYTES: Final = 64 * 2**20
"""A Hello of 100,000 streams is half of that: 320 bytes for each. Requests that have yet to get their prefill take 9
bytes more for every block of their prompts, 18 MiB of them together (`remote.MAX_JOIN_HASHES`)."""
MAX_COUNT: Final = 2**40  # of tokens, requests or calls: a sum over all that a router may have still fits a frame
MAX_SECONDS: Final = 1e9  # 30 years

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]  # NaN is refused, too
TicketNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def table_of(relay: str) -> str:
    """The name of a relay's key table (`key_table.py`), which all relays of one router on one machine share."""
    return relay.removeprefix("relay-").lstrip("0123456789")


class LinkError(BalanceRouteError):
    """The other side violates the protocol, or is not the right one."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The base of all messages, encoded as arrays: field names are not sent."""


def _check(spec: RequestSpec) -> None:
    """Check the numbers of a type of the core, which has no bounds. Raises: ValueError."""
    limited = spec.max_new_tokens is None or spec.max_new_tokens >= 0
    if not (limited and _is_count(spec.prompt_tokens) and _is_count(spec.block_tokens)):
        raise ValueError("a request has an impossible count")


def _is_count(value: int) -> bool:
    return 0 <= value <= MAX_COUNT


# -- joining ---------------------------------------------------------------------------------------------------------


class Held(Message, frozen=True):
    """A request that a relay holds: its ticket, `turn` and state."""

    ticket: TicketNumber
    turn: Count
    standing: Standing

    def __post_init__(self) -> None:
        """Raises: ValueError: a number is out of bounds."""
        state = self.standing
        _check(state.spec)
        counts = (state.tokens, state.earlier_tokens, state.requeues)
        # a prompt that a worker counts as shorter than the answer before it becomes negative with a new start
        if not (all(map(_is_count, counts)) and _is_count(abs(state.prompt_tokens))):
            raise ValueError("a request has an impossible count")
        if not (0.0 <= state.waited_s <= MAX_SECONDS and 0.0 <= state.ready_s <= MAX_SECONDS):
            raise ValueError("a request has an impossible age")


class Hello(Message, frozen=True, tag=0):
    """A relay joins. `relay`: its name; `process`: a random number, another one after each restart.

    `token_file`: the descriptor of its token counts (`token_counts.py`), for a brain on the same machine.
    """

    version: int
    relay: str
    process: int
    epoch: int
    held: tuple[Held, ...]
    token_file: int | None = None


class Welcome(Message, frozen=True, tag=1):
    """The relay is a member, and its requests are taken over. `void`: tickets that could not be, and have ended.

    `block_seed`: of the hashes of prompts' blocks: 64 bits, as equal prompts of two relays must have equal hashes.
    `reads_tokens`: the brain reads the relay's token counts from memory.
    """

    version: int
    epoch: int
    member: Count
    void: tuple[TicketNumber, ...]
    block_seed: Annotated[int, Meta(ge=0)]
    reads_tokens: bool = False


class Farewell(Message, frozen=True, tag=2):
    """The sender, of this `version`, closes the connection, for this `reason`. `epoch`: the largest that it knows.

    A relay of any version is to read it, so its fields stay as they are.
    """

    epoch: int
    reason: str
    version: int = VERSION


class Beat(Message, frozen=True, tag=3):
    """The sender runs; it had nothing else to send for a while, or it is a brain that still reads a large Hello."""


# -- a relay's calls: `decider.Decider` -------------------------------------------------------------------------------


class Submit(Message, frozen=True, tag=10):
    """A request arrives."""

    ticket: TicketNumber
    spec: RequestSpec

    def __post_init__(self) -> None:
        """Raises: ValueError: a number is out of bounds."""
        _check(self.spec)


class Prefilled(Message, frozen=True, tag=11):
    ticket: TicketNumber
    prompt_tokens: Count
    cached_tokens: Count | None


class PrefillFailed(Message, frozen=True, tag=12):
    ticket: TicketNumber


class RequestPrefill(Message, frozen=True, tag=13):
    ticket: TicketNumber


class Pushed(Message, frozen=True, tag=14):
    ticket: TicketNumber
    prompt_tokens: Count
    cached_tokens: Count | None


class PushFailed(Message, frozen=True, tag=15):
    ticket: TicketNumber


class Progress(Message, frozen=True, tag=16):
    """`tickets[i]` has generated `tokens[i]` so far."""

    tickets: tuple[TicketNumber, ...]
    tokens: tuple[Count, ...]


class PutBack(Message, frozen=True, tag=17):
    ticket: TicketNumber


class Requeue(Message, frozen=True, tag=18):
    """The request waits for prefill again. `prefix`: as in the ticket's spec, which a brain that took the ticket over
    while it decoded does not know. `anew`: without its tokens.
    """

    ticket: TicketNumber
    tokens: Count
    prefix: Sequence[int] = ()
    anew: bool = False


class Finish(Message, frozen=True, tag=19):
    """The request ended `age_s` ago; more than 0 only if it had generated tokens."""

    ticket: TicketNumber
    outcome: Outcome
    reason: str
    tokens: Count
    age_s: Seconds


class Began(Message, frozen=True, tag=20):
    """The first tokens of a request came `age_s` ago."""

    ticket: TicketNumber
    age_s: Seconds


# -- the brain's answers ---------------------------------------------------------------------------------------------


class Chosen(Message, frozen=True, tag=30):
    """A worker for the ticket."""

    ticket: TicketNumber
    turn: Count
    worker: str


class Refused(Message, frozen=True, tag=31):
    """The ticket is refused, and has ended."""

    ticket: TicketNumber
    kind: RefusalKind
    text: str
    retry_after_s: Seconds


class Seen(Message, frozen=True, tag=32):
    """The brain's view of the cluster, and its number of members; sent after a change, a few times per second at
    most.
    """

    view: ClusterView
    relays: Count


class WorkerStanding(Message, frozen=True):
    """A worker's state by the brain's judgement: its circuit, whether successes change that, and whether it is out.

    `cache_salt`, `ended_at`, `kv_connector`: as in `workers/fleet.py`. `withdrawn`: operators have drained or removed
    it.
    """

    spec: WorkerSpec
    state: WorkerState
    circuit: str
    doubtful: bool
    out: bool
    cache_salt: str = ""
    ended_at: float = 0.0
    kv_connector: str | None = None
    withdrawn: bool = False


class Workers(Message, frozen=True, tag=33):
    """Workers that are new or changed, and those that have left."""

    changed: tuple[WorkerStanding, ...]
    gone: tuple[str, ...]


class SilentGroup(Message, frozen=True):
    """A group of workers that fell silent together, `age_s` ago; infinite: this brain has never had an answer."""

    name: str
    workers: tuple[str, ...]
    age_s: Annotated[float, Meta(ge=0.0)]


class Silent(Message, frozen=True, tag=34):
    """All silent groups."""

    groups: tuple[SilentGroup, ...]


class KeysElsewhere(Message, frozen=True, tag=35):
    """The key use at another relay, for relays that do not share its key table.

    Empty: that relay is gone, or has no request with a key in flight.
    """

    relay: str
    keys: tuple[KeyUse, ...]


class PromptKeys(Message, frozen=True, tag=36):
    """How to make the keys of prompts for the brain's predictor (`forecasts.Keys`). Sent after the Welcome, and when it
    has changed. `salt` None: no keys are used.
    """

    salt: bytes | None = None
    by_header: bool = False


# -- what a relay's requests say of workers --------------------------------------------------------------------------


class Finding(StrEnum):
    """How a request at a worker fared: see `workers/circuit.py`."""

    USED = "used"
    SUCCESS = "success"
    INCONCLUSIVE = "inconclusive"
    FAULT = "fault"
    BUSY = "busy"


class Judged(Message, frozen=True, tag=40):
    """How a request fared at a worker. `retry_after_s`: what a busy worker asked for. `reason`: of a fault."""

    worker: str
    finding: Finding
    retry_after_s: Seconds = 0.0
    reason: str = ""


class Use(Message, frozen=True):
    """A relay's use of a worker.

    `in_use`: requests under way. `peak`: their maximum since the last report. `awaits_tokens`: whether a client waits
    for the worker's next token, and `awaited_age_s`: for how long. `progress_age_s`: since its last sign of life.
    None: never.
    """

    worker: str
    in_use: Count
    peak: Count
    awaits_tokens: bool
    progress_age_s: Seconds | None
    awaited_age_s: Seconds | None


class Activity(Message, frozen=True, tag=41):
    """A relay's activity: sent after joining, then after changes, a few times per second at most. `uses`: of changed
    workers.

    `drains`, `orphans`: requests whose pinned KV is being drained, or can't be. `keys`: its clients' key use, which
    the brain passes on to relays that do not share its key table.
    """

    exchanges: Count
    drains: Count
    uses: tuple[Use, ...]
    keys: tuple[KeyUse, ...] = ()
    orphans: Count = 0


class Counted(Message, frozen=True, tag=42):
    """All counts of the relay's process (`telemetry/metrics.py`): sent on joining, then every second if they have
    changed.
    """

    counts: bytes


class Learned(Message, frozen=True, tag=43):
    """The connector that a prefiller's KV parameters belong to, or the one by which a decode worker has called back;
    None: the parameters do not tell. Also after the first `Workers`, of what was learned before.
    """

    worker: str
    connector: str | None


class Explained(Message, frozen=True, tag=44):
    """A request was given up as the cause of these workers' deaths, `ages_s` ago; the brain tells the other relays.

    A relay's own requests on these workers are then not charged with a failed try.
    """

    workers: tuple[str, ...]
    ages_s: tuple[Seconds, ...]


class CacheDoubted(Message, frozen=True, tag=45):
    """A decode worker may have cached wrong KV; it gets this salt from now on. Sent again if the brain names an earlier
    one, or none.
    """

    worker: str
    cache_salt: str


class ConnectorDoubted(Message, frozen=True, tag=46):
    """Requests show that a worker, whose connector is not known yet, may have another one than the configured."""

    worker: str
    reason: str


Report = Judged | Activity | Counted | Learned | CacheDoubted | ConnectorDoubted
Asking = Prefilled | PrefillFailed | RequestPrefill | PushFailed | PutBack | Requeue  # each begins another `turn`
Call = Asking | Pushed | Finish | Began
FromRelay = Hello | Beat | Farewell | Submit | Progress | Call | Explained | Report
FromBrain = (
    Welcome | Farewell | Beat | Chosen | Refused | Seen | Workers | Silent | KeysElsewhere | PromptKeys | Explained
)

_encoder = msgspec.msgpack.Encoder()
_from_relay = msgspec.msgpack.Decoder(list[FromRelay])
_from_brain = msgspec.msgpack.Decoder(list[FromBrain])


def frame(messages: "list[FromRelay] | list[FromBrain]") -> bytes:
    """Encode messages as one frame."""
    body = _encoder.encode(messages)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def read_from_relay(body: bytes | memoryview) -> list[FromRelay]:
    """A frame's messages; of one that begins with the Hello of another version, only what all versions have in common.

    Raises: LinkError.
    """
    try:
        return _from_relay.decode(body)
    except ValueError as error:  # also for text that is not UTF-8
        hello = _hello_of_another_version(body)
        if hello is None:
            raise LinkError(f"a relay's frame can't be read: {error}") from None
        return [hello]


def _hello_of_another_version(body: bytes | memoryview) -> Hello | None:
    try:
        tag, version, relay = msgspec.msgpack.decode(body)[0][:3]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    is_other = tag == 0 and isinstance(version, int) and version != VERSION and isinstance(relay, str)
    return Hello(version, relay, 0, 0, ()) if is_other else None


def read_from_brain(body: bytes | memoryview) -> list[FromBrain]:
    """A frame's messages. Raises: LinkError."""
    try:
        return _from_brain.decode(body)
    except ValueError as error:
        raise LinkError(f"the brain's frame can't be read: {error}") from None
