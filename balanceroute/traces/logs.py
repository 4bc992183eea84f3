"""Reads requests from servers' logs: this router's, and vLLM's request log.

    router   this router's JSON lines, one "request" event per request at its end: when it ended and how long it took,
             its prompt tokens and the tokens that were generated
    vllm     the text log of `vllm serve --enable-log-requests --enable-log-outputs`: a line "Received request ID" (and,
             at log level DEBUG, "Request ID details" with the prompt's token ids), then "Generated response ID"

`--logging-config.formatter json` has the same messages in JSON lines. vLLM's stamps are whole seconds without a year;
`--jitter 1` spreads them. What it says of lengths depends on its version, level and flags. Token ids are counted; where
only the text is there, four characters count as a token; an answer of which nothing is said counts as the request's
`max_tokens`. What was not counted is `estimated`. Lists and texts that vLLM cut short (`--max-log-len`) look like short
ones.

Either may come as what collects logs has left it (`log_lines`): with other programs' lines between, something before
each line, colours, or each line in a JSON object. Lines that a process which was killed, or a full disk, has left half
written are left out and counted, as long as they are fewer than the others.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from balanceroute.bounded import MOST_IN_LINE
from balanceroute.errors import InputError
from balanceroute.traces.rows import Row, field_of, json_object, stamp_s
from balanceroute.traces.source import Source
from balanceroute.traces.trace import finite, text_lines, token_count

COLOUR = re.compile(r"\x1b\[[\d;]*m")
WRAPPERS = ("log", "MESSAGE")  # the names of the server's line in objects of docker and journald
DOCKERS = {"log", "stream", "time"}  # all names in docker's own objects
CRI = re.compile(r"\d{4}-\d\d-\d\dT\S+ (?P<stream>stdout|stderr) (?P<tag>[PF]) ")  # in /var/log/pods
LEFT_OUT = re.compile(r'"MESSAGE"\s*:\s*null')  # by `journalctl -o json` without --all: above 4096 bytes
VLLM_JSON = re.compile(r'\{"asctime": "\d{4}-')  # how each line of vLLM's JSON log begins
PLAIN_ROUTER = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [A-Z]+ +(?:\[[^]]*\] )?request ")  # `log.format: plain`
ROUTER_REQUEST = re.compile(r'"event": ?"request",.*"duration_s": ?\d')  # others, too, write events
ROUTER_LINE = re.compile(r'\{\s*"time"')  # how each line of its JSON log begins
FIRST_YEAR, LEAP_YEAR = 2001, 2004  # of stamps that have none: no year up to the second one has a 29 February
MOST_CHOICES = 65536  # that `limits.max_choices` may be
CHARACTERS_PER_TOKEN = 4.0  # of English, in the tokenizers of the day
STAMP = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR) (\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? ")
LOGGER = (
    r"\S*\] "  # what follows the stamp: "[logger.py:39] ", "logger.py:39] " in old versions; then the message begins
)
RECEIVED = re.compile(LOGGER + r"Received request (?P<id>\S+?): (?P<rest>.*)")
DETAILS = re.compile(LOGGER + r"Request (?P<id>\S+?) details: (?P<rest>.*)")
RESPONSE = re.compile(
    LOGGER + r"Generated response (?P<id>\S+?)(?: \(streaming (?P<part>delta|complete)\))?(?: details)?: (?P<rest>.*)"
)
IDS = r"{}: \[(?P<ids>[\d, ]*)\]"
PROMPT_IDS, OUTPUT_IDS = re.compile(IDS.format("prompt_token_ids")), re.compile(IDS.format("output_token_ids"))
MAX_TOKENS = re.compile(r"\bmax_tokens=(\d{1,9})\b")  # more is no limit of anything
TEXT = r"{}: (?P<quote>['\"])(?P<text>(?:\\.|(?!(?P=quote)).)*)(?P=quote)"  # as repr() writes it
PROMPT_TEXT, OUTPUT_TEXT = re.compile(TEXT.format("prompt")), re.compile(TEXT.format("output"))
STREAMED = re.compile(r"<streaming_complete: (\d{1,9}) tokens>")
CHOICE = re.compile(r"-\d+$")  # completions are numbered within their request: cmpl-ID-0


def log_lines(path: Source) -> Iterator[tuple[int, str]]:
    """(line number, text) as the server wrote it: without colours, and out of the objects of docker and journald.

    A JSON line of vLLM's comes as the line of text that it stands for. Of a character that is cut in two its bytes come
    as surrogates. What containers' runtimes have written in parts, of 16 KB, comes as one, with the number of its last.
    """
    begun: dict[str, str] = {}  # by stream: the parts of a line until now
    for line, part in text_lines(path, any_bytes=True):
        stream, text, goes_on = unwrapped(part)
        text = begun.pop(stream, "") + text
        if goes_on and len(text) < MOST_IN_LINE:
            begun[stream] = text
        else:
            yield line, COLOUR.sub("", as_text(text))
    if begun:
        path.half_line = line


def unwrapped(text: str) -> tuple[str, str, bool]:
    """The stream, the server's line, and whether more of it follows there.

    The line comes out of an object of docker's log files or of `journalctl -o json`, or from behind the stamp in files
    of Kubernetes' nodes; any other text is itself.
    """
    if found := CRI.match(text):
        goes_on = found["tag"] == "P"
        return found["stream"], text[found.end() :].rstrip("\r\n") if goes_on else text[found.end() :], goes_on
    if not text.startswith("{") or not any(f'"{name}"' in text for name in WRAPPERS):
        return "", text, False
    try:
        wrapper = json.loads(text)
    except (ValueError, RecursionError):
        return "", text, False
    found_texts = [text_in(wrapper.get(name)) for name in WRAPPERS]
    found_text = next((found for found in found_texts if found is not None), text)
    by_docker = wrapper.keys() - {"attrs"} == DOCKERS  # others leave the line end out
    return str(wrapper.get("stream", "")), found_text, by_docker and not found_text.endswith("\n")


def text_in(value: object) -> str | None:
    """The text that is the value of a wrapper's field; None: it is none.

    journald writes what is not printable, such as colours, as a list of bytes.
    """
    if isinstance(value, list):
        try:
            return bytes(value).decode(errors="surrogateescape")
        except (TypeError, ValueError):
            return None
    return value if isinstance(value, str) else None


def as_text(text: str) -> str:
    """The text form of a vLLM's JSON line; any other text unchanged."""
    if not (found := VLLM_JSON.search(text)):
        return text
    try:
        entry = json.loads(text[found.start() :])
        # the date without its year, and without the fraction of a second
        return f"{entry['levelname']} {entry['asctime'][5:19]} [{entry['name']}] {entry['message']}\n"
    except (KeyError, TypeError, ValueError, RecursionError):
        return text


@dataclass(slots=True)
class RouterLog:
    """Reads this router's JSON log; `damaged` are the lines that cannot be read, by number, each with the reason.

    `foreign`: the number of the first line in which a vLLM has received a request; 0: there is none.
    """

    damaged: dict[int, str] = field(default_factory=dict)
    foreign: int = 0

    def rows(self, path: Source) -> Iterator[Row]:
        """The requests in the log; failed ones may lack prompt or answer. Other lines are skipped.

        Raises: InputError for a request that says too little, or where most lines cannot be read.
        """
        read = 0
        for line, entry in self.entries(path):
            read += 1
            if entry.get("event") == "request":
                try:
                    for row in requests_in(entry):
                        yield line, *row, "", ()
                except KeyError as error:
                    raise InputError(f"{path}: line {line}: no field {error}") from error
                except ValueError as error:
                    raise InputError(f"{path}: line {line}: {error}") from error
        if len(self.damaged) > read:
            line, reason = next(iter(self.damaged.items()))
            raise InputError(
                f"{path}: {len(self.damaged):,} of {read + len(self.damaged):,} lines of this router cannot be read; "
                f"the first is line {line}: {reason}"
            )

    def entries(self, path: Source) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, object) of each line that this router has written, as far as it can be read."""
        for line, text in log_lines(path):
            _, brace, rest = text.partition("{")
            if '"event"' not in rest and not ROUTER_LINE.match(brace + rest):
                if not self.foreign and (stamp := STAMP.search(text)) and RECEIVED.match(text, stamp.end()):
                    self.foreign = line
                continue
            try:
                entry = json_object(brace + rest)
            except ValueError as error:
                self.damaged[line] = str(error)
            except RecursionError:
                self.damaged[line] = "JSON nested too deeply"
            else:
                if "event" in entry:
                    yield line, entry


def requests_in(entry: dict[str, Any]) -> list[tuple[float, int, int]]:
    """When the request of a line came, seconds, and its prompt and answer, tokens.

    One for several choices or prompts was as many to the workers; the line has their sums, which are shared out evenly.
    """
    ended_s = stamp_s(field_of(entry, "time"), "time")
    arrived_s = ended_s - finite(field_of(entry, "duration_s"), "duration_s")
    if not entry.get("prompt_tokens"):
        return [(arrived_s, 0, 0)]  # refused, or failed before its prompt was known
    prompt = token_count(field_of(entry, "prompt_tokens"), "prompt_tokens", least=1)
    tokens = token_count(field_of(entry, "tokens"), "tokens", least=0)
    choices = min(prompt, token_count(str(entry.get("choices", 1)), "choices", least=1), MOST_CHOICES)
    return [(arrived_s, (prompt + n) // choices, (tokens + n) // choices) for n in range(choices)]


@dataclass(slots=True)
class Logged:
    """A request's figures in a vLLM log so far; None: not logged yet."""

    line: int
    arrival_s: float
    prompt_tokens: int | None = None
    prompt_guess: int | None = None
    limit: int | None = None
    output_tokens: int = 0
    output_guess: int = 0
    deltas_guess: int = 0
    answered: bool = False

    def see_prompt(self, text: str) -> None:
        """Add a line about the prompt."""
        quoted, facts = parted(PROMPT_TEXT, text)
        ids, limit = PROMPT_IDS.search(facts), MAX_TOKENS.search(facts)
        if ids:
            self.prompt_tokens = count_ids(ids["ids"])
        if quoted is not None:
            self.prompt_guess = guess(quoted)
        if limit:
            self.limit = int(limit[1])

    def see_answer(self, text: str, part: str | None) -> None:
        """Add a line about the answer: a part of a stream, all of it, or one of several choices."""
        self.answered = True
        quoted, facts = parted(OUTPUT_TEXT, text)
        ids, streamed = OUTPUT_IDS.search(facts), STREAMED.fullmatch(quoted or "")
        if part == "complete":
            if streamed and not self.output_tokens:
                self.output_tokens = int(streamed[1])
            elif quoted:
                self.output_guess += guess(quoted)
            return
        if ids:
            self.output_tokens += count_ids(ids["ids"])
        if quoted and part == "delta":
            self.deltas_guess += len(quoted)
        elif quoted:
            self.output_guess += guess(quoted)

    @property
    def prompt(self) -> tuple[int, bool] | None:
        """The prompt's tokens, and whether they are estimated; None: unknown."""
        if self.prompt_tokens is not None:
            return self.prompt_tokens, False
        return None if self.prompt_guess is None else (self.prompt_guess, True)

    @property
    def output(self) -> tuple[int, bool] | None:
        """The answer's tokens, and whether they are estimated; None: unknown."""
        if self.output_tokens:
            return self.output_tokens, False
        guessed = self.output_guess or round(self.deltas_guess / CHARACTERS_PER_TOKEN)
        if self.answered:
            return guessed, True
        return None if self.limit is None else (self.limit, True)


def parted(quotation: re.Pattern[str], text: str) -> tuple[str | None, str]:
    """The prompt or answer that a line begins with, and what the log itself says after it.

    What a client or a model has written may look like a log.
    """
    quoted = quotation.match(text)
    return (quoted["text"], text[quoted.end() :]) if quoted else (None, text)


def count_ids(ids: str) -> int:
    """How many numbers a printed list holds."""
    return ids.count(",") + 1 if ids.strip() else 0


def guess(text: str) -> int:
    """Tokens of a text."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN)) if text else 0


@dataclass(slots=True)
class VllmLog:
    """Reads a vLLM log; `estimated` is the number of its requests whose prompt or answer was not counted.

    `unanswered`: those of them whose answers it does not mention. `promptless`: of how many others it has no prompt.
    `damaged`: numbers of the lines that journald has left out, and of the last line, where no line end follows: half a
    text would count as all of it. `foreign`: the number of the first line with a request of this router; 0: none.
    """

    estimated: int = 0
    promptless: int = 0
    unanswered: int = 0
    damaged: list[int] = field(default_factory=list)
    foreign: int = 0

    def rows(self, path: Source) -> Iterator[Row]:
        """The requests in order of arrival. Raises: InputError: there are none, or none with a prompt."""
        requests = logged_requests(path, self)
        if path.half_line is not None:
            self.damaged.append(path.half_line)
        if not requests and self.foreign:
            raise InputError(
                f"{path}: vLLM's lines hold no request, those of this router do (the first is line {self.foreign}): "
                "trace convert --format router"
            )
        if not requests:
            raise InputError(f"{path}: no line 'Received request': start vllm serve with --enable-log-requests")
        if all(entry.prompt is None for entry in requests):
            raise InputError(f"{path}: no prompt of any request: start vllm serve with VLLM_LOGGING_LEVEL=DEBUG, too")
        for entry in requests:
            if entry.prompt is None:
                self.promptless += 1
                continue
            if entry.output is None:
                yield entry.line, entry.arrival_s, 0, 0, "", ()
                continue
            (prompt, prompt_estimated), (output, output_estimated) = entry.prompt, entry.output
            if output:
                self.estimated += prompt_estimated or output_estimated
                self.unanswered += not entry.answered
            yield entry.line, entry.arrival_s, max(1, prompt), output, "", ()


class LeapDay(Exception):
    """A log has a 29 February; `first_year` is that of its first stamp, so that there is one."""

    def __init__(self, first_year: int) -> None:
        super().__init__()
        self.first_year = first_year


def logged_requests(path: Source, log: VllmLog, first_year: int = FIRST_YEAR) -> list[Logged]:
    """What whole lines of a vLLM log say of each request, in order of arrival.

    Clients choose ids, and use one again (each run of `vllm bench serve` has the same): answers are to the last request
    of the id. Lines that journald has left out are added to `log.damaged`. Raises: InputError: a time is none.
    """
    all_of_them: list[Logged] = []
    requests: dict[str, Logged] = {}
    lost: list[int] = []
    early: dict[str, str] = {}  # details, which vLLM prints before "Received request" of the same id
    when: datetime | None = None
    for line, text in log_lines(path):
        stamp = STAMP.search(text)
        if not stamp or line == path.half_line:
            if not stamp and LEFT_OUT.search(text):
                lost.append(line)
            elif not (stamp or log.foreign) and ROUTER_REQUEST.search(text):
                log.foreign = line
            continue
        try:
            when = following(stamp[1], when, path, line, first_year)
        except LeapDay as found:  # from then on all is a day later
            return logged_requests(path, log, found.first_year)
        if received := RECEIVED.match(text, stamp.end()):
            requests[received["id"]] = entry = Logged(line, when.timestamp())
            all_of_them.append(entry)
            entry.see_prompt(early.pop(received["id"], ""))
            entry.see_prompt(received["rest"])
        elif details := DETAILS.match(text, stamp.end()):
            known = find(requests, details["id"])
            if known and known.prompt is None:
                known.see_prompt(details["rest"])
            else:  # of a request with the same id that comes next
                early[details["id"]] = details["rest"]
        elif (response := RESPONSE.match(text, stamp.end())) and (known := find(requests, response["id"])):
            known.see_answer(response["rest"], response["part"])
    log.damaged += lost
    return all_of_them


def find(requests: dict[str, Logged], request_id: str) -> Logged | None:
    """The request of that id, or the one whose id is numbered less or more (a completion and its choices)."""
    for name in (request_id, CHOICE.sub("", request_id), f"{request_id}-0"):
        if name in requests:
            return requests[name]
    return None


def following(stamp: str, before: datetime | None, path: Source, line: int, first_year: int) -> datetime:
    """The time of a stamp without a year: in that of the line before, or in the next or last one where months would
    lie between. Back it goes where logs of several servers stand one behind the other.

    Raises: InputError: it is no time; LeapDay.
    """
    year = before.year if before is not None else first_year
    month_day, clock = stamp.split(" ")
    try:
        when = datetime.fromisoformat(f"{year}-{month_day}T{clock}").replace(tzinfo=UTC)
        if before is not None and abs(when - before) > timedelta(days=180):
            year += 1 if when < before else -1
            when = datetime.fromisoformat(f"{year}-{month_day}T{clock}").replace(tzinfo=UTC)
    except ValueError:
        if month_day == "02-29" and first_year == FIRST_YEAR:
            raise LeapDay(LEAP_YEAR - (year - first_year)) from None
        raise InputError(f"{path}: line {line}: {stamp!r:.60} is no date and time") from None
    return when
