"""Three requests share one pool of KV blocks: the block tables, step by step.

    python examples/block_tables.py

The model has full layers and layers with a window of 8 tokens; blocks hold 4 tokens. A small
scheduler feeds prompts under a budget of 8 tokens per step and then lets each request generate
4 tokens. `a` and `b` have the same first 12 tokens, so `b` finds them in the cache, in both
groups. `c` finds nothing and, in a pool of only 14 blocks, has to wait until the others are done.
"""

from __future__ import annotations

from kvtailor.runtime.kv.blocks import OutOfBlocks
from kvtailor.runtime.kv.hybrid import HybridManager
from kvtailor.runtime.kv.spec import FullSpec, SlidingSpec

BUDGET = 8
NEW_TOKENS = 4
SHARED = list(range(100, 112))
PROMPTS = {"a": [*SHARED, 1, 2, 3], "b": [*SHARED, 4, 5], "c": list(range(200, 218))}


def show(kv: HybridManager, requests: list[str]) -> None:
    for request in requests:
        computed = kv.num_computed(request)
        for group, spec in enumerate(kv.specs):
            # A dot where the request holds nothing: no query sees those tokens any more.
            table = " ".join(f"{block or '.':>3}" for block in kv.block_table(request, group))
            label = f"{request}, {computed:2} computed" if group == 0 else ""
            print(f"  {label:15}  {spec!s:10} {table}")
    print(f"  {kv!r}")


def main() -> None:
    kv = HybridManager(
        [FullSpec(block_size=4), SlidingSpec(8, block_size=4)], num_blocks=14, in_flight=BUDGET
    )
    tokens = {request: list(prompt) for request, prompt in PROMPTS.items()}
    waiting, running = ["a", "b", "c"], []
    step = 0
    while waiting or running:
        step += 1
        print(f"step {step}")
        budget, computed = BUDGET, {}
        # Who runs goes first; then, while tokens are left in the budget, who waits. b is held
        # back until a's prompt can be found.
        if waiting and all(kv.num_computed(r) >= len(PROMPTS[r]) for r in running):
            try:
                hit = kv.allocate(waiting[0], tokens[waiting[0]])
                print(f"  {waiting[0]} is admitted: {hit} of its tokens are in the cache")
                running.append(waiting.pop(0))
            except OutOfBlocks as refusal:
                print(f"  {waiting[0]} waits: {refusal}")
        for request in running:
            start = kv.num_computed(request)
            fed = tokens[request][start : start + budget]
            budget -= len(fed)
            kv.append(request, len(fed))
            computed[request] = fed
            if fed:
                slots = kv.slots(request, group=0, start=start).tolist()
                print(
                    f"  {request} computes tokens {start}..{start + len(fed) - 1} in slots {slots}"
                )
        # Here the model would run, and write keys and values to those slots.
        for request, fed in computed.items():
            kv.settle(request, fed)
            if kv.num_computed(request) == len(tokens[request]):
                # What the model sampled: made up here.
                tokens[request].append(len(tokens[request]))
        show(kv, running)
        for request in list(running):
            if len(tokens[request]) > len(PROMPTS[request]) + NEW_TOKENS:
                kv.free(request)
                running.remove(request)
                print(f"  {request} is done")
    print(kv.stats)


if __name__ == "__main__":
    main()
