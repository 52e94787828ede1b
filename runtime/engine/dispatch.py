"""Which attention function a model's layers call, in this thread alone and for a while."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

__all__ = ["forget_attention", "register_attention", "try_attention", "with_attention"]

_numbers = itertools.count()


class _Here(threading.local):
    """The attention implementation of whatever model this thread runs now; None: its config's."""

    def __init__(self) -> None:
        self.attention: str | None = None


_here = _Here()
_config_class: Any = PreTrainedConfig
_named = _config_class._attn_implementation
_own_attention = _named.fget


def _attention_here(config: Any) -> Any:
    own, here = _own_attention(config), _here.attention
    return own if here is None else here


# In place of changing a model's configs for a step, which other threads would see. A compiled model
# guards on it as on any attribute.
_config_class._attn_implementation = property(_attention_here, _named.fset)


def with_attention(name: str, call: Callable[..., Any], **arguments: Any) -> Any:
    """call(**arguments), in which models dispatch attention to the implementation `name`."""
    before = _here.attention
    try:
        _here.attention = name
        return call(**arguments)
    finally:
        _here.attention = before


def register_attention(attention: Any, mask: Any = None) -> str:
    """The name of a new implementation, of an attention function and one that makes masks."""
    name = f"kvtailor_paged_{next(_numbers)}"
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    return name


def forget_attention(name: str) -> None:
    """Undo what registered an attention or mask function; transformers has no call for that."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def try_attention(
    call: Callable[..., Any], attention: Any, mask: Any = None, **arguments: Any
) -> Any:
    """call(**arguments), this once with this attention function, and this one for masks."""
    name = register_attention(attention, mask)
    try:
        with torch.no_grad():
            return with_attention(name, call, **arguments)
    finally:
        forget_attention(name)
