"""Settings for the whole test run."""

from __future__ import annotations

import logging
import os

import pytest
import torch

# pytest's log capture would switch torch's structured trace on, which prints every graph.
logging.getLogger("torch.__trace").propagate = False

# Nothing of an earlier run may be found; tests of the cache name a folder of their own.
os.environ["KVTAILOR_CACHE_DIR"] = "off"

# Without a GPU the kernels run in Triton's interpreter, which must be chosen before Triton is
# imported, and Inductor's modules import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before is found, and nothing compiled here is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def always_pack(monkeypatch, fresh_dynamo):
    """An empty packing table: nothing was measured, so one matmul is taken everywhere."""
    from kvtailor.passes import packing

    monkeypatch.setattr(packing, "current_table", dict)


@pytest.fixture
def pieces(monkeypatch, fresh_dynamo):
    """CUDA graphs on the CPU capturer; the GraphedPieces that are made."""
    from kvtailor.compiler import pieces
    from kvtailor.runtime.cuda_graphs import GraphedPiece
    from kvtailor.tests.cpu_capturer import CpuCapturer

    made: list[GraphedPiece] = []

    def keep(*args):
        made.append(GraphedPiece(*args))
        return made[-1]

    monkeypatch.setattr(pieces, "make_capturer", CpuCapturer)
    monkeypatch.setattr(pieces, "GraphedPiece", keep)
    return made
