"""A Hugging Face language model, compiled by kvtailor, through its own generate().

    python examples/generate.py                        # a small Gemma3 with random weights
    python examples/generate.py MODEL --inner inductor # an id or a folder of yours

generate() calls the module, so model.compile(...) is what it honours; torch.compile(model) is not.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="Hugging Face id or folder")
    parser.add_argument("--prompt", default="Measure twice, cut once, and")
    parser.add_argument("--new-tokens", type=int, default=12)
    # "inductor" is the backend's default and the fast one; "eager" compiles in a second.
    parser.add_argument("--inner", choices=("inductor", "eager"), default="eager")
    arguments = parser.parse_args()

    if arguments.model is None:
        model, inputs = shrunk("gemma3_text", tokens=16, batch=1)
        tokenizer = None
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        inputs = tokenizer(arguments.prompt, return_tensors="pt")
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False}

    expected = model.generate(**inputs, **options)
    model.compile(backend="kvtailor", options={"inner": arguments.inner})
    with recording() as recorder:
        actual = model.generate(**inputs, **options)
    start = time.perf_counter()
    model.generate(**inputs, **options)
    seconds = time.perf_counter() - start

    print("tokens:", actual[0].tolist() if tokenizer is None else tokenizer.decode(actual[0]))
    print("same as eager:", torch.equal(actual, expected))
    print(f"{len(recorder.graphs)} graphs, second run {seconds:.2f} s")
    for site in recorder.graphs[0].attention:
        print(f"  {site.site}: {site.kind} {site.window or ''} queries {site.query_rows}")


if __name__ == "__main__":
    main()
