"""Which tokens of which requests run in the next step.

Running requests come first, oldest first, then waiting ones as they fit: continuous batching,
with prompts cut to the token budget. Where blocks run out, the youngest gives its own back and
waits; it is computed again later, from its prefix in the cache where that survived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from kvtailor.runtime.engine.requests import Request
from kvtailor.runtime.kv.blocks import OutOfBlocks
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.managers import BlockCopy

__all__ = ["Scheduled", "Scheduler"]


@dataclass(frozen=True)
class Scheduled:
    """The tokens start .. stop-1 of a request."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether all tokens are computed after it, so that the next one can be drawn."""
        return self.stop == len(self.request.tokens)


class Scheduler:
    """Requests that wait and run, over a block manager.

    token_budget: the most tokens of a step. max_requests: the most requests of a step. prepare:
    called with a request before it is admitted; if it says no, the request is gone.
    prefix_caching: whether requests take blocks of earlier ones with the same beginning.

    `requests`, in the order they came, is the truth; the rest can be made from it: `restart`.
    """

    def __init__(
        self,
        kv: HybridManager,
        token_budget: int,
        max_requests: int,
        prepare: Callable[[Request], bool],
        prefix_caching: bool = True,
    ) -> None:
        self.kv = kv
        self.prefix_caching = prefix_caching
        self._prepare = prepare
        self.token_budget = token_budget
        self.max_requests = max_requests
        self.requests: dict[Hashable, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        self.waiting.append(request)

    def restart(self, kv: HybridManager) -> None:
        """All requests wait, in the order they came, with nothing computed: `kv` is empty."""
        self.kv = kv
        for request in self.requests.values():
            request.num_computed, request.preempted = 0, False
        self.waiting, self.running = deque(self.requests.values()), []

    def schedule(self) -> tuple[list[Scheduled], list[BlockCopy]]:
        """The next step, whose tokens now have slots, and blocks to copy before it writes.

        Nothing while requests wait means that the first of them will never fit: see `stuck`.
        """
        budget = self.token_budget
        step: list[Scheduled] = []
        copies: list[BlockCopy] = []
        for request in list(self.running):
            if budget == 0:
                break
            if request not in self.running:
                # Preempted for an older one.
                continue
            count = min(budget, len(request.tokens) - request.num_computed)
            assert count > 0, f"a step must compute tokens of each request, got none for {request}"
            taken = self._append(request, count)
            if taken is None:
                break
            copies += taken
            budget -= count
            step.append(Scheduled(request, request.num_computed, request.num_computed + count))
        while self.waiting and budget and len(self.running) < self.max_requests:
            request = self.waiting[0]
            if not self._prepare(request):
                continue
            try:
                hit = self.kv.allocate(
                    request.id,
                    request.tokens,
                    salt=request.salt,
                    encoder_tokens=request.encoder_tokens,
                    reuse=self.prefix_caching and not request.wants_prompt_rows,
                )
            except OutOfBlocks:
                break
            count = min(budget, len(request.tokens) - hit)
            try:
                copies += self.kv.append(request.id, count)
            except OutOfBlocks:
                # Its own hits were all that was free.
                self.kv.free(request.id)
                break
            self.waiting.popleft()
            self.running.append(request)
            if not request.num_new:
                request.result.cached_tokens = hit
            request.num_computed = hit
            request.preempted = False
            budget -= count
            step.append(Scheduled(request, hit, hit + count))
        return step, copies

    def stuck(self) -> Request | None:
        """The request that waits though nothing runs, after an empty `schedule`."""
        return self.waiting[0] if self.waiting and not self.running else None

    def _append(self, request: Request, count: int) -> list[BlockCopy] | None:
        """Slots for `count` more tokens, at the cost of younger requests; None if it gave way."""
        while True:
            try:
                return list(self.kv.append(request.id, count))
            except OutOfBlocks:
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    return None

    def preempt(self, request: Request) -> None:
        """Give its blocks back; it waits before all that never ran."""
        self.kv.preempt(request.id)
        self.running.remove(request)
        request.num_computed = 0
        request.preempted = True
        self.waiting.appendleft(request)

    def undo(self, step: list[Scheduled]) -> None:
        """The step was not run: its tokens have no slots any more."""
        for part in step:
            self.kv.rollback(part.request.id, part.stop - part.start)

    def remove(self, request: Request) -> None:
        """The request is over, if it is not already: its blocks go back."""
        if self.requests.pop(request.id, None) is None:
            return
        if request in self.running:
            self.running.remove(request)
            self.kv.free(request.id)
        else:
            self.waiting.remove(request)
            if request.preempted:
                self.kv.free(request.id)
