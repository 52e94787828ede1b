"""Packed weights are the parameters' own memory, and follow whatever becomes of them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from kvtailor.cli.models import shrunk
from kvtailor.runtime.packed_weights import (
    PackedInput,
    PackedWeights,
    are_alone,
    concatenated,
    existing_order,
    neighbours,
    pack,
    why_not,
)

pytestmark = pytest.mark.usefixtures("always_pack")


def parameters(*rows: int, K: int = 8) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(n, K)) for n in rows]


def storage_bytes(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(s.nbytes() for s in storages.values())


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="kvtailor", options={"inner": "eager", **options})


def check(run: Any, model: Any, inputs: dict[str, Any], tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        actual, expected = run(**inputs).logits, model(**inputs).logits
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def are_packed(model: Any, layer: int = 0) -> bool:
    attention = model.model.layers[layer].self_attn
    weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    return neighbours(weights, [w.shape[0] for w in weights]) is not None


def test_neighbours_are_seen_only_where_they_are():
    parts = parameters(2, 4, 6)
    values = torch.cat(list(parts)).clone()
    assert neighbours(parts, [2, 4, 6]) is None
    pack(parts)
    joined = neighbours(parts, [2, 4, 6])
    assert joined is not None and torch.equal(joined, values)
    # A part of them, in order, is joined as well; out of order, or with a gap, it is not.
    assert neighbours(parts[1:], [4, 6]) is not None
    assert neighbours([parts[0], parts[2]], [2, 6]) is None
    assert neighbours(parts[::-1], [6, 4, 2]) is None
    with torch.no_grad():
        parts[1].mul_(2)
    assert torch.equal(joined[2:6], values[2:6] * 2)


def test_each_part_is_a_storage_by_itself_and_the_buffer_goes_with_the_last():
    parts: list[Any] = parameters(2, 4, 6)
    pack(parts)
    joined = neighbours(parts, [2, 4, 6])
    assert joined is not None and len({p.untyped_storage().data_ptr() for p in parts}) == 3
    assert [p.untyped_storage().nbytes() for p in parts] == [p.nbytes for p in parts]
    buffer = weakref.ref(joined)
    del joined
    for i in range(3):
        assert buffer() is not None
        parts[i].data = torch.zeros(1)
    gc.collect()
    assert buffer() is None


def test_memory_that_processes_share_stays():
    parts: list[Any] = parameters(2, 4)
    args = [p.share_memory_() for p in parts]
    assert why_not(args[0], "view") == ("shared", "the weight is in memory that processes share")
    packed = PackedWeights([PackedInput((0, 1), (2, 4))])
    assert torch.equal(packed(args)[0], torch.cat(args)) and args[0].is_shared()


def test_storages_that_happen_to_touch_are_no_neighbours():
    block = torch.randn(4, 8)
    address = block.data_ptr()

    class Touching:
        """The next tensor after block, by address alone."""

        def data_ptr(self) -> int:
            return address + block.numel() * block.element_size()

    assert neighbours([block, Touching()], [4, 4]) is None  # type: ignore[list-item]


def test_who_else_uses_a_storage_is_known():
    # torch._C._storage_Use_Count is private: this is the test that fails when it moves.
    parts = parameters(2, 4)
    assert are_alone(parts)
    pack(parts)
    assert are_alone(parts)
    view = parts[0].detach()
    assert not are_alone(parts)
    del view
    assert are_alone(parts)
    shared = nn.Parameter(parts[1].data)
    # Known or not, overlapping memory is nobody's own.
    assert not are_alone(parts) and not are_alone([*parts, shared])


def test_an_existing_order_is_kept():
    parts = parameters(2, 4, 6)
    pack(parts)
    assert existing_order(parts[::-1]) == [2, 1, 0]
    assert existing_order([parts[2], parts[0]]) == [0, 1]


def test_packing_mends_itself():
    parts: list[Any] = parameters(2, 4)
    packed = PackedWeights([PackedInput((0, 2), (2, 4))])
    args = [parts[0], "something else", parts[1]]
    assert torch.equal(packed(args)[0], torch.cat(parts))
    args[2] = nn.Parameter(torch.randn(4, 8))
    with torch.inference_mode():
        assert torch.equal(packed(args)[0], torch.cat([args[0], args[2]]))
    assert neighbours([args[0], args[2]], [2, 4]) is not None
    assert not args[2].is_inference() and args[2].requires_grad
    # Memory that others share is not moved from under them.
    other = nn.Parameter(torch.randn(4, 8))
    view = other.data
    args[2] = other
    assert torch.equal(packed(args)[0], torch.cat([args[0], other]))
    assert other.data_ptr() == view.data_ptr()


def flags_of_mapping(address: int) -> list[str]:
    """What the kernel was told of the memory at an address, as /proc/self/smaps has it."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            low, high = (int(end, 16) for end in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no transparent huge pages"
)
def test_packed_weights_ask_for_huge_pages():
    size = 2 << 20
    parts = [torch.randn(2048, 512), torch.randn(1024, 512), torch.randn(1024, 512)]
    out = concatenated(parts)
    assert torch.equal(out, torch.cat(parts))
    assert out.untyped_storage().nbytes() == out.nbytes == 4 * size
    whole = -(-out.data_ptr() // size) * size
    assert "hg" in flags_of_mapping(whole)


def test_copies_follow_versions_and_addresses():
    parts: list[Any] = parameters(2, 4)
    packed = PackedWeights([PackedInput((0, 1), (2, 4))], mode="copy")
    first = packed(parts)[0]
    assert packed(parts)[0] is first and torch.equal(first, torch.cat(parts))
    assert neighbours(parts, [2, 4]) is None
    with torch.no_grad():
        parts[0].add_(1)
    assert torch.equal(packed(parts)[0], torch.cat(parts))
    parts[1] = nn.Parameter(torch.randn(4, 8))
    assert torch.equal(packed(parts)[0], torch.cat(parts))


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "weight, code",
    [
        (torch.randn(4, 8), "not-a-parameter"),
        (nn.Parameter(torch.randn(4, 8).as_subclass(_Subclass)), "tensor-subclass"),
        (nn.Parameter(torch.randn(4, 8).to_sparse()), "layout"),
        (nn.Parameter(torch.randn(4, 8, device="meta")), "meta"),
        (nn.Parameter(torch.randn(8, 4).t()), "non-contiguous"),
        (nn.Parameter(torch.randn(3, 3)), "alignment"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_packed_says_why(weight: Any, code: str):
    reason = why_not(weight, "view")
    assert reason is not None and reason[0] == code


def test_weights_made_under_inference_mode_stay():
    with torch.inference_mode():
        weight = nn.Parameter(torch.randn(4, 8), requires_grad=False)
    reason = why_not(weight, "view")
    assert reason is not None and reason[0] == "inference-tensor"


@pytest.mark.parametrize("pack_mode", ["view", "copy"])
def test_a_model_follows_its_weights(pack_mode: str):
    model, inputs = shrunk("llama", tokens=7)
    other, _ = shrunk("llama", tokens=7, seed=1)
    names = list(model.state_dict())
    before = storage_bytes(model)
    run = compiled(model, pack=pack_mode)
    check(run, model, inputs)
    assert are_packed(model) == (pack_mode == "view")
    assert list(model.state_dict()) == names
    assert storage_bytes(model) <= 1.01 * before

    model.load_state_dict(other.state_dict())
    check(run, model, inputs)
    with torch.no_grad():
        check(run, other, inputs)
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(0.5)
            layer.mlp.up_proj.weight.add_(0.1)
    check(run, model, inputs)
    attention = model.model.layers[1].self_attn
    attention.v_proj.weight = nn.Parameter(torch.randn_like(attention.v_proj.weight))
    check(run, model, inputs)
    if pack_mode == "view":
        # An edit through .data leaves no trace of a version.
        attention.q_proj.weight.data.neg_()
        check(run, model, inputs)
        attention.q_proj.weight.data = torch.randn_like(attention.q_proj.weight)
        check(run, model, inputs)
        assert are_packed(model, 1)


def float32_storages() -> dict[int, int]:
    """Address and size of every matrix there is, other tests' too."""
    return {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) in (Tensor, nn.Parameter)
        and x.layout == torch.strided
        and x.dtype == torch.float32
        and x.dim() == 2
    }


def test_memory_of_a_model_that_was_cast():
    before = float32_storages()
    model, inputs = shrunk("llama", tokens=7)
    half = sum(p.numel() * 2 for p in model.parameters())
    run = compiled(model)
    check(run, model, inputs)
    model.to(torch.bfloat16)
    check(run, model, inputs, tolerance=2e-2)
    assert are_packed(model)
    assert storage_bytes(model) <= 1.01 * half
    # Nothing keeps the old memory alive.
    gc.collect()
    new = {at: size for at, size in float32_storages().items() if at not in before}
    width = model.config.hidden_size
    assert max(new.values(), default=0) <= 4 * width * model.config.vocab_size
    model.to(torch.float32)
    check(run, model, inputs)
    assert are_packed(model)


def _save_model(model: Any, path: Path) -> dict[str, Tensor]:
    safetensors.torch.save_model(model, str(path))
    return safetensors.torch.load_file(path)


def _hub(model: Any, path: Path) -> dict[str, Tensor]:
    path.mkdir(exist_ok=True)
    huggingface_hub.save_torch_model(model, path)
    return safetensors.torch.load_file(path / "model.safetensors")


def _pretrained(model: Any, path: Path) -> dict[str, Tensor]:
    model.save_pretrained(path)
    return safetensors.torch.load_file(path / "model.safetensors")


def _state_dict(model: Any, path: Path) -> dict[str, Tensor]:
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


def _one_parameter(model: Any, path: Path) -> dict[str, Tensor]:
    name = "model.layers.0.self_attn.k_proj.weight"
    torch.save({name: model.state_dict()[name]}, path)
    return torch.load(path, weights_only=True)


def _whole_model(model: Any, path: Path) -> dict[str, Tensor]:
    torch.save(model, path)
    return torch.load(path, weights_only=False).state_dict()


def _pickled(model: Any, path: Path) -> dict[str, Tensor]:
    path.write_bytes(pickle.dumps(model))
    return pickle.loads(path.read_bytes()).state_dict()


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*")) if path.is_dir() else path.stat().st_size


SAVES = (_save_model, _hub, _pretrained, _state_dict, _one_parameter, _whole_model, _pickled)


@pytest.mark.parametrize("pack_mode", ["view", "copy"])
def test_a_packed_model_is_saved_and_loaded_in_every_usual_way(tmp_path, pack_mode: str):
    model, inputs = shrunk("llama", tokens=7)
    sizes = []
    for each in SAVES:
        each(model, tmp_path / f"unpacked{each.__name__}")
        sizes.append(_size(tmp_path / f"unpacked{each.__name__}"))
    check(compiled(model, pack=pack_mode), model, inputs)
    assert are_packed(model) == (pack_mode == "view")
    values = model.state_dict()
    for each, size in zip(SAVES, sizes):
        loaded = each(model, tmp_path / each.__name__)
        assert loaded and set(loaded) <= set(values)
        assert all(torch.equal(values[name], x) for name, x in loaded.items()), each
        assert _size(tmp_path / each.__name__) <= 1.02 * size, each
    fresh, _ = shrunk("llama", tokens=7, seed=1)
    safetensors.torch.load_model(fresh, str(tmp_path / "_save_model"))
    check(compiled(fresh), model, inputs)
    copied = copy.deepcopy(model)
    assert storage_bytes(copied) <= storage_bytes(model)
    check(compiled(copied), model, inputs)
    assert are_packed(model) == (pack_mode == "view")


OPTIMIZERS: dict[str, Any] = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("pack_mode", ["view", "copy"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_packed_weights_follow_every_optimizer(name: str, pack_mode: Any):
    parts = parameters(2, 4)
    packed = PackedWeights([PackedInput((0, 1), (2, 4))], pack_mode)
    optimizer = OPTIMIZERS[name](parts)
    for _ in range(2):
        before = packed(parts)[0].clone()
        sum(p.square().sum() for p in parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        after = packed(parts)[0]
        assert torch.equal(after, torch.cat(list(parts))) and not torch.equal(before, after)


def test_two_instances_and_a_copy_do_not_disturb_each_other():
    model, inputs = shrunk("llama", tokens=7)
    other, _ = shrunk("llama", tokens=7, seed=1)
    runs = [(m, compiled(m)) for m in (model, other)]
    runs.append((copied := copy.deepcopy(model), compiled(copied)))
    addresses = []
    for _ in range(2):
        for each, run in runs:
            check(run, each, inputs)
        addresses.append([m.model.layers[0].self_attn.k_proj.weight.data_ptr() for m, _ in runs])
    assert addresses[0] == addresses[1]


def test_a_packed_model_can_be_trained():
    model, inputs = shrunk("llama", tokens=7)
    with torch.inference_mode():
        compiled(model)(**inputs)
    assert are_packed(model)
    fresh, _ = shrunk("llama", tokens=7)
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, fresh)]
    for each, optimiser in zip((model, fresh), optimisers):
        each(**inputs).logits.float().pow(2).mean().backward()
        optimiser.step()
    for ours, theirs in zip(model.parameters(), fresh.parameters()):
        torch.testing.assert_close(ours, theirs)


def test_weights_whose_memory_is_shared_stay_where_they_are():
    model, inputs = shrunk("llama", tokens=7)
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = nn.Parameter(attention.v_proj.weight.data)
    run = compiled(model)
    check(run, model, inputs)
    assert attention.k_proj.weight.data_ptr() == attention.v_proj.weight.data_ptr()
    with torch.no_grad():
        attention.k_proj.weight.neg_()
    check(run, model, inputs)
    held = model.model.layers[1].self_attn.q_proj.weight.detach()
    torch._dynamo.reset()
    check(compiled(model), model, inputs)
    assert held.data_ptr() == model.model.layers[1].self_attn.q_proj.weight.data_ptr()
