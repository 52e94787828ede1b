"""kvtailor: a torch.compile backend that tailors a model to the attention it proves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtailor.backend import kvtailor, recording
    from kvtailor.runtime.engine.engine import Engine
    from kvtailor.runtime.kv.paged_cache import PagedCache, PagedEncoderDecoderCache
    from kvtailor.runtime.qcrosskv import ColwiseQCrossKV, QCrossKVLinear

__version__ = "0.1.0"
__all__ = [
    "ColwiseQCrossKV",
    "Engine",
    "PagedCache",
    "PagedEncoderDecoderCache",
    "QCrossKVLinear",
    "__version__",
    "kvtailor",
    "recording",
]

# Loaded on first use: `kvtailor --help` must not wait for torch.
_WHERE = {
    "ColwiseQCrossKV": "kvtailor.runtime.qcrosskv",
    "Engine": "kvtailor.runtime.engine.engine",
    "PagedCache": "kvtailor.runtime.kv.paged_cache",
    "PagedEncoderDecoderCache": "kvtailor.runtime.kv.paged_cache",
    "QCrossKVLinear": "kvtailor.runtime.qcrosskv",
    "kvtailor": "kvtailor.backend",
    "recording": "kvtailor.backend",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'kvtailor' has no attribute {name!r}")
