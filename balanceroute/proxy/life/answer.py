"""The answer to one prompt so far, and its continuation when the decode worker is lost.

A decode that ends early, because the engine gave the request back or the worker died, becomes a new request: prompt and
answer so far as token ids, the limit reduced by the generated tokens. The client sees one unbroken stream. If that
would give a wrong answer (`resumption.py`), or the ids are not known, the answer starts again from the original prompt,
provided that the client has seen nothing of it; if it has, the answer ends with an error.
"""

import secrets
from array import array
from collections.abc import Callable
from typing import Any, Final

from balanceroute.core.types import Role
from balanceroute.errors import BadUpstreamReply, NotResumable, Rejected, UpstreamError, UpstreamStatus
from balanceroute.proxy.admission.prompt_estimates import has_estimate
from balanceroute.proxy.life.errors import DeadlineExceeded, PromptsDiffer
from balanceroute.proxy.life.outlet import Outlet, write_last
from balanceroute.proxy.life.resumption import Fidelity, parses_calls, resumption
from balanceroute.proxy.life.retries import pushes_back
from balanceroute.proxy.life.services import LifeServices
from balanceroute.proxy.life.streaming import write_part
from balanceroute.proxy.wire.answer_identity import WHOLE, Part
from balanceroute.proxy.wire.client_request import ClientRequest
from balanceroute.proxy.wire.closing import ended_by_length, usage_of
from balanceroute.proxy.wire.derived_requests import cut_alike, resume
from balanceroute.proxy.wire.probe_reply import PrefillResult
from balanceroute.proxy.wire.prompt_echo import prompt_text
from balanceroute.proxy.wire.sse import EventScanner, StreamEnd, Translation
from balanceroute.proxy.workers.fleet import Worker

MAX_RESTARTS: Final = 8  # restarts of an answer that can't be resumed: each one is lost work
NOTHING_YET: Final = EventScanner()  # stands for the scanner until the first prefill is done


class Answer:
    """A request, its answer so far, and the outlet for it.

    `request`: the next one for workers: the client's, or one that continues after the last worker. `estimated_tokens`:
    the prompt's size before a prefiller has counted it. `prompt_tokens`: its size after that; 0: not counted yet.
    """

    __slots__ = (
        "_continues_as",
        "_estimated",
        "_is_of_another_prompt",
        "_original",
        "_prefilled_ids",
        "_prompt",
        "_restarts",
        "_services",
        "_translation",
        "cached_tokens",
        "estimated_tokens",
        "outlet",
        "part",
        "prompt_details",
        "prompt_reply",
        "prompt_tokens",
        "request",
        "scanner",
    )

    def __init__(
        self,
        services: LifeServices,
        request: ClientRequest,
        outlet: Outlet,
        part: Part = WHOLE,
        translation: Callable[[], Translation] | None = None,
        first: "Answer | None" = None,
    ) -> None:
        """`part`: what it is of the client's answer. `translation`: for one in another protocol. `first`: the first
        answer to the same prompt, which estimates it for all.
        """
        self._services, self.outlet = services, outlet
        self.request = self._original = request
        self.part, self._translation = part, translation
        self.scanner = NOTHING_YET
        self._continues_as = ""  # the label in `resumes` of a continuation without a token yet; "": there is none
        self._prompt: PrefillResult  # the figures of the client's own prompt, estimated until a prefiller has them
        self._prefilled_ids: array[int] | None = None  # ids of the last prefilled prompt, if reported
        self._estimated = first is None and has_estimate(request)
        self.estimated_tokens: int
        if first is not None:
            self.estimated_tokens = first.estimated_tokens
        elif self._estimated:
            self.estimated_tokens = services.prompt_estimates.estimate(request)
        else:
            self.estimated_tokens = request.prompt_tokens
        self.prompt_tokens = self._restarts = 0
        self._is_of_another_prompt = False  # the present decode worker's part of it: see `check_prompt`
        self.cached_tokens: int | None = None
        self.prompt_details: dict[str, Any] | None = None  # the prefiller's usage details of it
        self.prompt_reply: dict[str, Any] | None = None  # a prefiller's whole answer, for `PromptWishes`

    # -- what a prefiller says of the prompt

    def prefilled(self, result: PrefillResult) -> None:
        """Take the result of a prefill; the first, of the client's own prompt, begins the answer. Raises: EdgeFull."""
        self._prefilled_ids = result.prompt_token_ids
        if self.scanner is NOTHING_YET:
            self.prompt_counted(result)
            self.begin(result)

    def prompt_counted(self, result: PrefillResult) -> None:
        """Take the size of the client's own prompt from a prefiller, after it may have cut it.

        Raises: EdgeFull: there is no room for its answer.
        """
        self.cut_prompt(result.prompt_tokens)
        self._prompt = result
        self.prompt_tokens, self.cached_tokens = result.prompt_tokens, result.cached_tokens
        self.prompt_details, self.prompt_reply = result.prompt_details, result.reply
        if self._estimated:
            error = abs(self.estimated_tokens - result.prompt_tokens) / (result.prompt_tokens or 1)
            self._services.metrics.prompt_estimate_error.observe(error)
            self._services.prompt_estimates.learn(self._original, self.estimated_tokens, result.prompt_tokens)
        self.outlet.prompt_came(result.kept_bytes)

    def cut_prompt(self, tokens: int | None) -> None:
        """Have workers cut the client's prompt to so many tokens, if its limit asks for a cut; None: do not cut."""
        if self.request is self._original and "truncate_prompt_tokens" in self._original.rest:
            self.request = self._original = cut_alike(self._original, tokens)

    @property
    def decodes(self) -> bool:
        """Whether the present decode worker has all of the prompt's KV: it has sent tokens, or the whole answer."""
        return bool(self.scanner.generated.in_segment) or self.scanner.finish_reason is not None

    @property
    def used_tokens(self) -> int:
        """The tokens of prompt and answer, for the client's key. Decode first, an answer may end before a prefiller has
        counted its prompt.
        """
        tokens = self.scanner.tokens
        prompt_tokens = self.prompt_tokens or self.scanner.prompt_tokens or (self.estimated_tokens if tokens else 0)
        return prompt_tokens + tokens

    def count_prompt_by_decoder(self) -> None:
        """Take the prompt's size from the decode worker, if no prefiller has counted it by the end of the decode."""
        if not self.prompt_tokens:
            self.prompt_tokens = self.scanner.prompt_tokens or (self.scanner.usage or {}).get("prompt_tokens") or 0

    def check_prefill(self, worker: Worker, result: PrefillResult) -> None:
        """Check the size of a continued prompt: an engine too old for token ids in a chat would start the answer again.

        Raises: BadUpstreamReply: the prefill was of another prompt than prompt and answer so far.
        """
        expected = self.request.prompt_tokens
        if self.request is not self._original and result.prompt_tokens != expected:
            text = f"it can't go on from token ids: prefilled {result.prompt_tokens} tokens, not {expected}"
            raise worker.failure(BadUpstreamReply, text)

    def await_push(self) -> None:
        """Decode first, expect a prefill for the next decode worker: that of an earlier one says nothing about it."""
        self._prefilled_ids = None

    def check_push(self, prefiller: str, worker: Worker, result: PrefillResult) -> None:
        """Check a prefill against the decode worker's prompt, now if that is known, else at its first event.

        Raises: PromptsDiffer.
        """
        self._prefilled_ids = result.prompt_token_ids
        self.check_prompt(prefiller, worker, len(self.scanner.generated.prompt_ids or ()))

    def check_prompt(self, prefiller: str, worker: Worker, read: int) -> None:
        """Check that prefiller and decode worker count the same prompt; with other templates or tokenizers the KV is
        wrong, and the answer can only start again.

        Args: prefiller: its id. read: how many token ids of the prompt its decode worker has told; 0: it has told none.

        Raises: PromptsDiffer.
        """
        computed, fleet = self._prefilled_ids, self._services.fleet
        if self.request is not self._original or not computed or not read:
            return
        differs_from: set[str] = fleet[prefiller].differs_from if prefiller in fleet else set()
        if len(computed) == read:
            differs_from.discard(worker.id)
            return
        differs_from.add(worker.id)
        self._is_of_another_prompt = True
        error = worker.failure(
            PromptsDiffer,
            f"its prompt has {read} tokens, and {len(computed)} at the prefiller: their chat templates, "
            "tokenizers or versions differ",
        )
        error.elsewhere = any(one.able and one.id not in differs_from for one in fleet.of(Role.DECODE))
        if prefiller in fleet:
            self._keep_apart(fleet[prefiller], worker)
            if not error.elsewhere:
                error.elsewhere = any(one.able and worker.id not in one.differs_from for one in fleet.of(Role.PREFILL))
                error.prefiller = prefiller if error.elsewhere else ""
        raise error

    def _keep_apart(self, prefiller: Worker, worker: Worker) -> None:
        """Have nothing served from what this decode worker has cached, or will, of that prefiller's KV.

        Decode first, whose KV a worker is going to cache is not known when it is asked.
        """
        if worker.id not in prefiller.apart_at or self._services.config.decode_first:
            prefiller.apart_at[worker.id] = secrets.token_hex(8)
            self._services.fleet.doubt_cache(worker)

    def begin(self, result: PrefillResult) -> None:
        """Begin an answer. `result`: the figures of its prompt."""
        request, self._prompt = self.request, result
        self._is_of_another_prompt = False
        prefix = prompt_text(request, result.reply) if request.stream else ""
        self.scanner = EventScanner(
            chat=request.endpoint == "chat",
            prefix=prefix,
            want_token_ids=request.return_token_ids,
            want_usage=request.include_usage or request.assembled,
            want_continuous_usage=request.continuous_usage,
            unasked_usage=not request.counted_by_usage,
            hide_reasoning=request.hides_reasoning,
            stops_at_marker=request.stops_at_marker,
            prompt_tokens=self.prompt_tokens or None,  # clients get no estimate
            prompt_details=result.prompt_details,
            part=self.part,
            translation=self._translation,
        )

    # -- when the decode ends early

    @property
    def may_move(self) -> bool:
        """Whether it can continue on another worker; if not, it stays until it is late."""
        scanner = self.scanner
        if not scanner.tokens or not self.outlet.started:
            return True
        return self._services.config.retry.resume_on_worker_loss and self._resumable

    @property
    def ids_to_resume_from(self) -> "array[int]":
        """The ids that it would continue from; empty: it can't be continued."""
        return self.scanner.generated.kept_ids if self._resumable else NOTHING_YET.generated.ids

    @property
    def _resumable(self) -> bool:
        """Whether its ids are known, and another engine could continue from them."""
        scanner = self.scanner
        if self._is_of_another_prompt or not scanner.generated.exact:
            return False
        return resumption(self._original, scanner.cut()).fidelity is not Fidelity.INVALID

    @property
    def last_text(self) -> str | None:
        """What the client was shown last, where ids may hold more than that; None: they do not."""
        return self.scanner.last_text if parses_calls(self._original) else None

    def resume(self, error: UpstreamError | None, worker_id: str, broken: int = 0, withheld: bool = False) -> bool:
        """Make the request that continues after this worker; False: its limit leaves nothing to generate.

        Args: error: how the worker was lost; None: it gave the request back. broken: the number of ids at the answer's
        end that are an incomplete character. withheld: the ids hold text that the client was not shown (`seam.py`).

        Raises: `error`, NotResumable or BadUpstreamReply, when it can't be resumed. An engine's own error is raised as
        it is: it says more than that the answer can't go on.
        """
        scanner = self.scanner
        lost = error or BadUpstreamReply("the answer can't be resumed", worker=worker_id, tier="decode")
        is_lost = error is not None and not pushes_back(error)
        if self.outlet.started and is_lost and not self._services.config.retry.resume_on_worker_loss:
            raise lost
        cut = scanner.cut(broken, withheld)
        scanner.resume(0 if cut.halved else broken)
        if self._is_of_another_prompt:
            self._start_again(lost)
            return True
        if scanner.tokens == 0:
            self.request = self._original
            return True
        how = resumption(self._original, cut)
        if how.fidelity is Fidelity.INVALID and not isinstance(error, UpstreamStatus):
            text = f"the answer was cut off, and {how.because} is state that another decode worker does not have"
            lost = NotResumable(text, worker=worker_id, tier="decode")
        prompt_ids = scanner.generated.prompt_ids or self._prefilled_ids or self._prompt.prompt_token_ids
        if how.fidelity is Fidelity.INVALID or not scanner.generated.exact or prompt_ids is None:
            self._start_again(lost)
            return True
        self._continues_as = how.fidelity.name.lower()
        try:
            self.request = resume(self._original, prompt_ids[: self.prompt_tokens], scanner.generated.ids)
        except ValueError:
            return False
        return True

    def _start_again(self, lost: UpstreamError) -> None:
        """Start again from the original prompt. Raises: `lost`: the client has seen part of the answer."""
        self._restarts += 1
        if self._restarts > MAX_RESTARTS or not self.outlet.forget():
            raise lost
        self._continues_as = "restarted"
        self.request = self._original
        self.begin(self._prompt)

    def count_resumed(self) -> None:
        """Count its continuation after a loss, if it has just got a token of it, or is complete."""
        if self._continues_as:
            self._services.metrics.resumes.inc(self._continues_as)
            self._continues_as = ""

    def count_ended(self, error: BaseException | None) -> None:
        """Count its end with this error, if it was cut off, or is not continued after a loss."""
        cut_off = isinstance(error, Rejected | UpstreamError) and not isinstance(error, DeadlineExceeded)
        if self._continues_as or (cut_off and self.scanner.tokens and self.scanner.end is not StreamEnd.DONE):
            self._services.metrics.resumes.inc("ended")

    # -- ends that no worker has written

    async def end_by_length(self) -> None:
        """End the answer with "length", as a worker would: its limit was reached when the worker was lost."""
        outlet, request, scanner = self.outlet, self._original, self.scanner
        usage = usage_of(self.prompt_tokens, 0) if request.continuous_usage else None  # tokens are the workers' before
        scanner.identity.expect("", checked=False)  # the router's own events have no worker's id
        out = scanner.feed(ended_by_length(request.model, usage, chat=request.endpoint == "chat"))
        if not outlet.started:
            outlet.start()
        await write_last(outlet, out)

    async def close_finished(self) -> None:
        """Complete an answer that has a finish reason, but no [DONE] from the worker.

        To continue it would generate beyond its end. Only the usage is sent; [DONE] is not made up.
        """
        scanner = self.scanner
        scanner.end = StreamEnd.NO_DONE
        usage_event = scanner.missing_usage()
        if usage_event:
            await write_part(self.outlet, usage_event)
