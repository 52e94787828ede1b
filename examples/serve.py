"""Eight prompts that begin alike, served together from a paged cache.

    python examples/serve.py          # a small Gemma3 with random weights; prompts are token ids
    python examples/serve.py MODEL    # an id or a folder of yours; prompts are text

The same prompts through generate(), one by one, give the same tokens.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvtailor
from kvtailor.cli.models import shrunk

BEGINNING = "You are a careful carpenter. Answer in one sentence. Question: "
QUESTIONS = ("what is oak?", "what is a dovetail?", "which saw?", "why sand?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="Hugging Face id or folder")
    parser.add_argument("--new-tokens", type=int, default=12)
    arguments = parser.parse_args()

    if arguments.model is None:
        model, inputs = shrunk("gemma3_text", tokens=24, batch=1)
        tokenizer = None
        start = inputs["input_ids"][0].tolist()
        prompts = [[*start, 2 + i, 3] for i in range(8)]
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        texts = [BEGINNING + question for question in QUESTIONS * 2]
        prompts = [tokenizer(text)["input_ids"] for text in texts]

    engine = kvtailor.Engine(model, tokenizer, block_size=8, token_budget=64)
    begun = time.perf_counter()
    results = engine.generate(prompts, max_new_tokens=arguments.new_tokens)
    seconds = time.perf_counter() - begun

    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, max_new_tokens=arguments.new_tokens, do_sample=False)
        expected.append(out[0, len(prompt) :].tolist())
    for result in results[:4]:
        print(result.token_ids if tokenizer is None else result.text)
    stats = engine.stats
    count = sum(len(result.token_ids) for result in results)
    print("same as generate:", [result.token_ids for result in results] == expected)
    print(f"{count} tokens in {seconds:.2f} s")
    print(f"{stats.hit_tokens} of {stats.queried_tokens} prompt tokens found in the cache")


if __name__ == "__main__":
    main()
