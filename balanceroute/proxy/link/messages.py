"""Everything that relays and the brain say to each other. This file is the protocol; `VERSION` counts its changes.

A frame is four bytes of length, big-endian, and one msgpack array of messages, each an array that begins with its
number. Both sides collect what they have to say in one turn of their loop and write it as one frame: a frame wakes a
process that slept, which costs more than all that is in it. So what nobody waits for (`Began`; `Finish`, while no
request waits for a slot) goes along with the next message, or alone after `SOON_S`. What streams have
generated is not said to a brain on the same machine, which reads it (`token_counts.py`); to others it is said within
`PROGRESS_S`, in one message per relay and not per stream.

    relay                                      brain
      |-- Hello(version, relay, epoch, ...) ------>|   who it is, and everything that lives there
      |<-- Welcome(version, epoch, member) --------|   or Farewell(reason), and the connection is closed
      |-- Submit, Prefilled, ..., Progress ------->|
      |<-- Chosen, Refused, Seen ------------------|
      |-- Judged, Activity, CacheDoubted --------->|   what requests have found out about workers
      |<-- Workers, Silent ------------------------|   which there are, and what they may get
      |-- Beat ----------------------------------->|   both ways, so that silence can be told from having nothing to say
      |<-- Beat -----------------------------------|

**Numbers for requests.** A relay numbers its tickets; ids cross once, in `Submit` or `Held`. Tokens of a ticket are
sums since `Submit`, or since the Hello that held it, so one that is read or said twice does no harm. `turn` counts the
calls of a ticket that ask for an answer, beginning with 1 for its arrival; an answer carries the turn that it is to, so
one that has crossed a later call is known and dropped.

**Epochs.** Each leadership of a brain has a number, larger than all before. A relay never goes back to a smaller one:
its Hello says the largest that it has seen, and a brain that leads under a smaller one is not the leader any more. A
membership has a number as well (`member`): what a relay that was given up as dead still says on its old connection is
not read, and it has to say Hello again.

**Workers** are judged by the brain: it asks for their health, and relays tell it how their requests fared. Relays only
hold connections, and hear of every change. The first `Workers` of a membership names all there are.

**Between machines** the same frames go over TCP and TLS (`far.py`, `reach.py`). There the name of a relay is that of
its process, `@` and that of its run folder in the cluster; and a brain that drains says Farewell to them. A relay whose
process ends as it should says Farewell, too, so that the log can tell it from one that is lost.

Times are durations (`_s`, before the message was written): clocks of two machines have nothing in common.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from balanceroute.core.types import Outcome, RequestSpec, Standing, WorkerSpec, WorkerState
from balanceroute.core.view import ClusterView
from balanceroute.errors import BalanceRouteError
from balanceroute.proxy.admission.decider import RefusalKind
from balanceroute.proxy.perimeter.key_use import KeyUse

VERSION: Final = 6
FAR: Final = "@"  # in the name of a relay of another machine, before that machine's; in no other
MAX_EPOCH: Final = 2**48  # that a peer is believed: they begin with seconds since 1970 at most, and frames carry 2**64
PROGRESS_S: Final = 0.005
SOON_S: Final = 0.05  # a slot that nobody waits for may be known to be free so late: about a step
BEAT_S: Final = 1.0
SILENT_S: Final = 5.0  # a process that says nothing for so long is given up; one that has died is known of at once
HEAD_BYTES: Final = 4  # of a frame: its length
MAX_FRAME_BYTES: Final = 64 * 2**20
"""A Hello of 100,000 streams is half of that: 320 bytes for each. Each request that has yet to get its prefill takes 9
bytes more for every block of its prompt."""


def table_of(relay: str) -> str:
    """The same for relays of one router on one machine, which share what their clients use of keys (`key_table.py`)."""
    return relay.removeprefix("relay-").lstrip("0123456789")


class LinkError(BalanceRouteError):
    """The other side says what it may not, or is not the one to talk to."""


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Arrays instead of maps: names are not sent."""


# -- joining ---------------------------------------------------------------------------------------------------------


class Held(Message, frozen=True):
    """A request that lives at a relay, where it stands, and how many answers it has asked for."""

    ticket: int
    turn: int
    standing: Standing


class Hello(Message, frozen=True, tag=0):
    """A relay joins. `relay` is its name, `process` tells one life of it from the next.

    `token_file`: which of its open files holds its tokens (`token_counts.py`), for a brain on the same machine.
    """

    version: int
    relay: str
    process: int
    epoch: int
    held: tuple[Held, ...]
    token_file: int | None = None


class Welcome(Message, frozen=True, tag=1):
    """The relay is a member; what it told is taken over. `void`: tickets that could not be, and have ended.

    `salt`: of the keys of prompts, where the brain's predictor asks for them. `reads_tokens`: tokens that the relay has
    written down need not be said.
    """

    version: int
    epoch: int
    member: int
    void: tuple[int, ...]
    salt: bytes | None = None
    reads_tokens: bool = False


class Farewell(Message, frozen=True, tag=2):
    """The connection is over: `reason` says why. `epoch`: of the one who says it, or knows of it."""

    epoch: int
    reason: str


class Beat(Message, frozen=True, tag=3):
    """Nothing else was to be said for a while."""


# -- a relay's calls: `decider.Decider` -------------------------------------------------------------------------------


class Submit(Message, frozen=True, tag=10):
    """A request arrives."""

    ticket: int
    spec: RequestSpec


class Prefilled(Message, frozen=True, tag=11):
    ticket: int
    prompt_tokens: int
    cached_tokens: int | None


class PrefillFailed(Message, frozen=True, tag=12):
    ticket: int


class RequestPrefill(Message, frozen=True, tag=13):
    ticket: int


class Pushed(Message, frozen=True, tag=14):
    ticket: int
    prompt_tokens: int
    cached_tokens: int | None


class PushFailed(Message, frozen=True, tag=15):
    ticket: int


class Progress(Message, frozen=True, tag=16):
    """`tokens[i]` of `tickets[i]` by now."""

    tickets: tuple[int, ...]
    tokens: tuple[int, ...]


class PutBack(Message, frozen=True, tag=17):
    ticket: int


class Requeue(Message, frozen=True, tag=18):
    """`prefix`: as in the ticket's spec; a brain that was told of the ticket while it generated does not know it."""

    ticket: int
    tokens: int
    prefix: Sequence[int] = ()


class Finish(Message, frozen=True, tag=19):
    """`age_s` ago, which is more than nothing only where tokens had come."""

    ticket: int
    outcome: Outcome
    reason: str
    tokens: int
    age_s: float


class Began(Message, frozen=True, tag=20):
    """The first tokens came `age_s` ago."""

    ticket: int
    age_s: float


# -- the brain's answers ---------------------------------------------------------------------------------------------


class Chosen(Message, frozen=True, tag=30):
    """A worker for the ticket."""

    ticket: int
    turn: int
    worker: str


class Refused(Message, frozen=True, tag=31):
    """The ticket has left with this refusal."""

    ticket: int
    kind: RefusalKind
    text: str
    retry_after_s: float


class Seen(Message, frozen=True, tag=32):
    """The cluster as the brain sees it; sent when it has changed, a few times per second at most."""

    view: ClusterView


class WorkerStanding(Message, frozen=True):
    """A worker as the brain judges it: its circuit, whether successes matter to that, and whether it is out.

    `cache_salt`, `ended_at`: as in `workers/fleet.py`.
    """

    spec: WorkerSpec
    state: WorkerState
    circuit: str
    doubtful: bool
    out: bool
    cache_salt: str = ""
    ended_at: float = 0.0


class Workers(Message, frozen=True, tag=33):
    """Workers that are new or have changed, and those that have left."""

    changed: tuple[WorkerStanding, ...]
    gone: tuple[str, ...]


class SilentGroup(Message, frozen=True):
    """A group of workers that fell silent together, so long ago."""

    name: str
    workers: tuple[str, ...]
    age_s: float


class Silent(Message, frozen=True, tag=34):
    """All such groups."""

    groups: tuple[SilentGroup, ...]


class KeysElsewhere(Message, frozen=True, tag=35):
    """What another relay's clients have used of their keys, to all that do not share it in memory; nothing: that relay
    is gone, or has none in flight.
    """

    relay: str
    keys: tuple[KeyUse, ...]


# -- what a relay's requests say of workers --------------------------------------------------------------------------


class Finding(StrEnum):
    """How a request at a worker fared: see `workers/circuit.py`."""

    USED = "used"
    SUCCESS = "success"
    INCONCLUSIVE = "inconclusive"
    FAULT = "fault"
    BUSY = "busy"


class Judged(Message, frozen=True, tag=40):
    """A request has told something about a worker; `retry_after_s` is what a busy one asked for."""

    worker: str
    finding: Finding
    retry_after_s: float = 0.0


class Use(Message, frozen=True):
    """What a relay has at a worker: requests under way, the most since it said so last, whether a client waits for the
    worker's next token, how long ago the last proof of life came, and the first request after idleness; None: never.
    """

    worker: str
    in_use: int
    peak: int
    awaits_tokens: bool
    progress_age_s: float | None
    busy_age_s: float | None


class Activity(Message, frozen=True, tag=41):
    """What a relay does: after joining, and a few times per second if that is new. `uses`: of workers with news.

    `keys`: what clients' keys have used, which the brain tells relays that do not know it.
    """

    exchanges: int
    drains: int
    uses: tuple[Use, ...]
    keys: tuple[KeyUse, ...] = ()


class Counted(Message, frozen=True, tag=42):
    """What the relay's process has counted (`telemetry/metrics.py`), all of it: on joining, and every second if new."""

    counts: bytes


class Learned(Message, frozen=True, tag=43):
    """A prefiller's parameters have been looked at, and told its connector; None: they don't tell."""

    worker: str
    connector: str | None


class Explained(Message, frozen=True, tag=44):
    """A request was given up as the cause of these workers' deaths, `ages_s` ago; the brain tells the other relays.

    Requests of theirs that were on one of them have only been there.
    """

    workers: tuple[str, ...]
    ages_s: tuple[float, ...]


class CacheDoubted(Message, frozen=True, tag=45):
    """A decode worker may have cached wrong KV; it gets this salt from now on. Also on joining, of earlier doubts."""

    worker: str
    cache_salt: str


FromRelay = (
    Hello
    | Beat
    | Farewell
    | Submit
    | Prefilled
    | PrefillFailed
    | RequestPrefill
    | Pushed
    | PushFailed
    | Progress
    | PutBack
    | Requeue
    | Finish
    | Began
    | Judged
    | Activity
    | Counted
    | Learned
    | Explained
    | CacheDoubted
)
FromBrain = Welcome | Farewell | Beat | Chosen | Refused | Seen | Workers | Silent | KeysElsewhere | Explained

_encoder = msgspec.msgpack.Encoder()
_from_relay = msgspec.msgpack.Decoder(list[FromRelay])
_from_brain = msgspec.msgpack.Decoder(list[FromBrain])


def frame(messages: "list[FromRelay] | list[FromBrain]") -> bytes:
    """The messages as one frame."""
    body = _encoder.encode(messages)
    return len(body).to_bytes(HEAD_BYTES, "big") + body


def read_from_relay(body: bytes | memoryview) -> list[FromRelay]:
    """A frame's messages. Raises: LinkError."""
    try:
        return _from_relay.decode(body)
    except ValueError as error:  # a text that is no UTF-8, too
        raise LinkError(f"a relay's frame can't be read: {error}") from None


def read_from_brain(body: bytes | memoryview) -> list[FromBrain]:
    """A frame's messages. Raises: LinkError."""
    try:
        return _from_brain.decode(body)
    except ValueError as error:
        raise LinkError(f"the brain's frame can't be read: {error}") from None
