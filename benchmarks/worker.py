"""One alternative in one scenario, in a process of its own, which the parent tells when to run.

    python -m kvtailor.benchmarks.worker SCENARIO ALTERNATIVE RESULT.pt THREADS [--quick]

It answers in lines of JSON: first {"first": seconds of the first call, "versions": {...}}, with
the result in RESULT.pt; then a line per line it reads: "run" -> {}, "peak" -> {"bytes": int or
null}. It ends when there is nothing more to read. What libraries print goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    scenario, alternative, path, threads = sys.argv[1:5]
    import torch

    torch.set_num_threads(int(threads))
    from kvtailor.benchmarks.harness import peak_memory
    from kvtailor.benchmarks.scenarios import ALTERNATIVES, SCENARIOS, save_result

    case = SCENARIOS[scenario].case(alternative, "--quick" in sys.argv, int(threads))
    start = time.perf_counter()
    result = case()
    first = time.perf_counter() - start
    save_result(result, Path(path))
    del result
    packages = ("torch", "transformers", *ALTERNATIVES[alternative])
    versions = {name: found for name in packages if (found := version_of(name))}
    answer(first=first, versions=versions)
    for line in sys.stdin:
        if line.strip() == "peak":
            answer(bytes=peak_memory(case))
        else:
            case()
            answer()


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
