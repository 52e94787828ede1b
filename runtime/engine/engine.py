"""What users call: continuous batching of any transformers model over the block manager.

    engine = Engine(model, tokenizer, max_memory="1GiB")
    for result in engine.generate(["Once upon a time", "In the beginning"], max_new_tokens=64):
        print(result.text)

A step flattens the tokens of all requests to ``[1, N]``: parts of prompts beside single new
tokens. Requests share the blocks of equal prefixes. If the model was compiled
(``model.compile(backend="kvtailor")``), so are the steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Generator, Hashable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from kvtailor.runtime.engine.batch import make_batch
from kvtailor.runtime.engine.model import ServedModel
from kvtailor.runtime.engine.outcome import Outcome, decide, end, rows_to_score, said
from kvtailor.runtime.engine.pool import fit, num_bytes
from kvtailor.runtime.engine.prompts import PromptReader, as_prompts
from kvtailor.runtime.engine.requests import Request, Result, Update
from kvtailor.runtime.engine.sampling import Sampling, is_integer, sampling, samplings
from kvtailor.runtime.engine.scheduler import Scheduled, Scheduler
from kvtailor.runtime.engine.step import PagedStep
from kvtailor.runtime.engine.verify import learn_reads, verify_step
from kvtailor.runtime.kv.blocks import Stats
from kvtailor.runtime.kv.hybrid import HybridManager

__all__ = ["Engine"]


class Engine:
    """Generates for many prompts at once with one transformers model.

    model: in eval mode; its attention must go through transformers' AttentionInterface, which is
    checked, with everything else steps rely on, by running a few tokens (verify=False skips
    that). tokenizer: for prompts and results as text. max_memory: bytes for keys and values, or a
    text like "512MiB". max_tokens: the longest request, prompt and new tokens (default: what the
    model and max_memory allow). block_size: tokens per block. token_budget: the most tokens of a
    step; longer prompts are computed in parts. max_requests: the most requests of a step.
    prefix_caching: whether requests share the blocks of equal prefixes, also of earlier requests.
    encoder_tokens: the longest output of an encoder (default: the model's most, else 512).
    graph_decode: whether steps of one new token per request get a form that CUDA graphs can hold,
    if the model is compiled with those: it costs another compilation (default: on a CUDA device).

    Threads take turns: a call waits for the step of another thread. A call from within the
    engine's own step is a RuntimeError. An exception ends the request it comes from; one that is
    no request's (the model's, an interrupt) is raised, and leaves all as before the step.

    Raises ValueError for a model it can't serve, saying why.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_memory: int | str = "1GiB",
        max_tokens: int | None = None,
        block_size: int = 16,
        token_budget: int = 2048,
        max_requests: int = 256,
        prefix_caching: bool = True,
        encoder_tokens: int | None = None,
        graph_decode: bool | None = None,
        verify: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._served = served = ServedModel(model, encoder_tokens)
        _require_sizes(
            token_budget=token_budget,
            max_requests=max_requests,
            block_size=block_size,
            max_tokens=1 if max_tokens is None else max_tokens,
            encoder_tokens=1 if encoder_tokens is None else encoder_tokens,
        )
        most = served.longest(max_tokens)
        layers = served.layers(block_size)
        memory = num_bytes(max_memory)
        layout, num_blocks, most = fit(layers, memory, most, token_budget, max_requests)
        if max_tokens is not None and most < max_tokens:
            raise ValueError(
                f"max_memory must hold a request of max_tokens={max_tokens}, "
                f"got {max_memory}, which holds one of {most}"
            )
        self.max_tokens = most
        self._reader = PromptReader(served, tokenizer, most)
        if graph_decode is None:
            graph_decode = served.raw.device.type == "cuda"
        self._step = PagedStep(served, layers, layout, num_blocks, most if graph_decode else None)
        self._scheduler = Scheduler(
            HybridManager(layout.specs, num_blocks, in_flight=token_budget),
            token_budget,
            max_requests,
            self._prepare_encoder,
            prefix_caching,
        )
        self._names = itertools.count()
        # Updates nobody has taken yet, the requests of streams, and streams that were left.
        self._ready: list[Update] = []
        self._streamed: set[Hashable] = set()
        self._left: list[Collection[Hashable]] = []
        # What the last step came to, until all of it is done; whether something is half done.
        self._decided: list[Outcome] = []
        self._torn = False
        self._lock = threading.RLock()
        self._busy = False
        check = partial(verify_step, layers=layers) if verify else learn_reads
        self._step.adapt(partial(check, self._step, served))

    # Requests

    def add_request(
        self,
        prompt: str | Sequence[int] | Tensor,
        request_id: Hashable = None,
        *,
        decoder_prompt: Sequence[int] | None = None,
        **ask: Any,
    ) -> Hashable:
        """Queue a prompt; returns its id. `step` until its Update carries a result.

        prompt: text, token ids, or for a model with an encoder what that takes: text, ids, or
        features [bins, frames]; decoder_prompt then are the ids the decoder starts with. ask:
        fields of `Sampling`. Raises ValueError, queueing nothing, for a prompt that is empty, too
        long, or not of this vocabulary, and for unknown fields.
        """
        if request_id is None:
            request_id = next(self._names)
        if not isinstance(request_id, Hashable):
            raise ValueError(f"request_id must be hashable, got {request_id!r}")
        self._add(self._reader.request(prompt, request_id, decoder_prompt, sampling(**ask)))
        return request_id

    def _add(self, request: Request) -> None:
        with self._alone():
            if request.id in self._scheduler.requests:
                raise ValueError(f"request_id must be new, got {request.id!r} again")
            self._torn = True
            self._scheduler.add(request)
            self._torn = False

    def abort(self, request_id: Hashable) -> Result | None:
        """End a request now; None if there is no such request any more."""
        with self._alone():
            return self._abort(request_id)

    def _abort(self, request_id: Hashable) -> Result | None:
        request = self._scheduler.requests.get(request_id)
        if request is None:
            return None
        outcome = end(request, "abort")
        self._torn = True
        self._take([outcome])
        self._torn = False
        return request.result

    @property
    def has_requests(self) -> bool:
        """Whether `step` has something to do, or to return."""
        return len(self._scheduler) > 0 or any(map(self._is_anybodys, self._ready))

    @property
    def stats(self) -> Stats:
        """Counters of the block manager: hits, preemptions, blocks in use."""
        return self._kv.stats

    @property
    def _kv(self) -> HybridManager:
        return self._scheduler.kv

    # Steps

    def step(self) -> list[Update]:
        """Run one step; an Update for every request that got a token or ended.

        If the model itself raises, the requests are as before it: step again, or abort. What a
        `stream` asked for goes to that stream.
        """
        return self._step_for(self._is_anybodys)

    def _is_anybodys(self, update: Update) -> bool:
        return update.request_id not in self._streamed

    def _step_for(self, wanted: Callable[[Update], bool]) -> list[Update]:
        """Run one step; returns the updates that are `wanted`, and keeps the others."""
        with self._alone():
            self._torn = True
            self._run_step()
            self._torn = False
            mine = [update for update in self._ready if wanted(update)]
            self._ready = [update for update in self._ready if not wanted(update)]
            return mine

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time, with the engine in order before and after it."""
        with self._lock:
            if self._busy:
                raise RuntimeError("an engine must not be called from within its own step")
            try:
                self._busy = True
                self._tidy()
                yield
            finally:
                try:
                    self._tidy()
                finally:
                    self._busy = False

    def _tidy(self) -> None:
        """Put right what an exception left half done, and drop what streams left behind.

        The requests and what was decided for them are the truth, and blocks are only a cache: all
        of them are forgotten. To be interrupted here does no harm, it is done again.
        """
        if self._torn:
            old = self._kv
            kv = HybridManager(
                old.specs, old.pool.num_blocks, in_flight=self._scheduler.token_budget
            )
            kv._counts = old._counts
            self._scheduler.restart(kv)
            self._take(self._decided)
            self._torn = False
        while self._left:
            names = self._left[-1]
            for name in names:
                self._abort(name)
            self._ready = [update for update in self._ready if update.request_id not in names]
            self._streamed.difference_update(names)
            self._left.pop()

    def _take(self, decided: list[Outcome]) -> None:
        """Do what was decided: from here on it is certain, also if this is interrupted."""
        self._decided = decided
        for outcome in decided:
            outcome.take()
            if outcome.reason is not None:
                self._scheduler.remove(outcome.request)
        updates = [update for outcome in decided for update in outcome.updates]
        self._ready, self._decided = self._ready + updates, []

    def _run_step(self) -> None:
        step, copies = self._scheduler.schedule()
        for copied in copies:
            self._step.pages.copy_blocks(copied.group, [copied.source], [copied.target])
        if not step:
            self._fail_stuck()
            return
        try:
            decided = self._run(step)
        except BaseException:
            self._scheduler.undo(step)
            self._torn = False
            raise
        for part in step:
            request = part.request
            self._kv.settle(request.id, request.tokens[part.start : part.stop])
            request.num_computed = part.stop
        self._take(decided)

    def _fail_stuck(self) -> None:
        stuck = self._scheduler.stuck()
        if stuck is None:
            return
        needed = self._step.layout.request_blocks(len(stuck.tokens), self._scheduler.token_budget)
        why = f"a request must fit in the pool's {self._kv.pool.num_blocks} blocks, "
        self._take([end(stuck, "error", f"{why}got one that takes {needed}")])

    def _run(self, step: list[Scheduled]) -> list[Outcome]:
        """Run the model on a step, and see what that comes to: nothing is changed by it."""
        rows, spans = rows_to_score(step)
        parts = [(p.request.id, p.request.tokens, p.start, p.stop) for p in step]
        states = [p.request.encoder_states for p in step]
        lens = [p.request.encoder_tokens or 0 for p in step]
        self._step.set(make_batch(self._kv, parts, states, lens))
        # A step of unfinished prompts needs no scores; the model still wants a row to compute.
        every = any(p.request.wants_prompt_rows for p in step)
        logits = self._step.run(rows or [0], narrow=not every)[: len(rows)]
        return decide(step, spans, logits, self.max_tokens)

    def _prepare_encoder(self, request: Request) -> bool:
        """Run the encoder of a request about to be admitted: once, unless it is preempted.

        False if that fails, which ends the request.
        """
        if request.encoder_input is None or request.encoder_states is not None:
            return True
        try:
            states = self._served.encode(request.encoder_input)
        except Exception as error:
            self._take([end(request, "error", said(error))])
            return False
        request.encoder_states, request.encoder_tokens = states, states.shape[1]
        return True

    # Whole prompts

    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        progress: bool = False,
        **ask: Any,
    ) -> list[Result]:
        """One result per prompt, in order.

        prompts: texts, or lists of token ids (a single text counts as one prompt). ask: fields of
        `Sampling`; seed may be a list with one per prompt, else prompt i has seed + i. A prompt
        that can't be served has a result with finish_reason "error"; the others go on. progress:
        show a bar.
        """
        prompts = as_prompts(prompts)
        results: dict[int, Result] = {}
        with (
            _bar(progress, len(prompts)) as advance,
            closing(self.stream(prompts, **ask)) as updates,
        ):
            for update in updates:
                if update.result is not None:
                    assert update.index is not None
                    results[update.index] = update.result
                    advance()
        return [results[index] for index in range(len(results))]

    def stream(self, prompts: str | Sequence[Any], **ask: Any) -> Generator[Update, None, None]:
        """As `generate`, but yields every new token as it comes: see `Update`.

        Leaving the loop early aborts what has not ended.
        """
        prompts = as_prompts(prompts)
        return self._stream(prompts, samplings(len(prompts), ask))

    def _stream(self, prompts: list[Any], asks: list[Sampling]) -> Generator[Update, None, None]:
        index_of: dict[Hashable, int] = {}
        refused: list[Update] = []
        try:
            for index, (prompt, ask) in enumerate(zip(prompts, asks)):
                name: Hashable = ("generate", next(self._names))
                try:
                    request = self._reader.request(prompt, name, None, ask)
                except Exception as error:
                    result = Result(name, [], finish_reason="error", error=said(error))
                    refused.append(Update(name, None, "", result, index))
                    continue
                index_of[name] = index
                self._streamed.add(name)
                self._add(request)
            yield from refused
            ended = 0
            while ended < len(index_of):
                for update in self._step_for(lambda update: update.request_id in index_of):
                    ended += update.result is not None
                    yield replace(update, index=index_of[update.request_id])
        finally:
            # At once, or after the step that this is called from.
            self._left.append(index_of)
            with self._lock:
                if not self._busy:
                    with self._alone():
                        pass


def _require_sizes(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


@contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar of finished prompts, or nothing."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("prompts", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
