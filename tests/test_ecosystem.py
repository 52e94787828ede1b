"""What kvtailor has to live with: generate's own compiling, pipelines, adapters, exports, ranks."""

from __future__ import annotations

import socket
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kvtailor.backend import recording
from kvtailor.cli.models import shrunk

OPTIONS = {"inner": "eager"}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="kvtailor", options=OPTIONS)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def test_generate_compiles_with_it():
    from transformers import CompileConfig

    model, inputs = shrunk("llama", tokens=8)
    settings: dict[str, Any] = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    want = model.generate(**inputs, **settings)
    config = CompileConfig(backend="kvtailor", options=OPTIONS, mode=None)
    # generate compiles on a GPU only, unless told otherwise.
    config._compile_all_devices = True
    with recording() as recorder:
        got = model.generate(
            **inputs, **settings, cache_implementation="static", compile_config=config
        )
    assert torch.equal(got, want)
    assert recorder.graphs and all(graph.captured for graph in recorder.graphs)


def test_pipeline():
    from transformers import AutoModelForSequenceClassification, pipeline

    model, _ = shrunk("bert", tokens=8, num_labels=3)
    classifier = AutoModelForSequenceClassification.from_config(model.config).eval()

    class Words:
        """A tokenizer of four words, as far as the pipeline asks."""

        pad_token_id = 0

        def __call__(self, text: str, **kwargs: Any) -> dict[str, torch.Tensor]:
            ids = [2 + len(word) for word in text.split()]
            return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}

    with torch.no_grad():
        want = classifier(**Words()("a bb ccc dddd")).logits.softmax(-1)
    classifier.compile(backend="kvtailor", options=OPTIONS)
    with recording() as recorder:
        ask = pipeline("text-classification", model=classifier, tokenizer=Words(), top_k=None)
        found = {each["label"]: each["score"] for each in ask(["a bb ccc dddd"])[0]}
    labels = [classifier.config.id2label[i] for i in range(want.shape[1])]
    torch.testing.assert_close(torch.tensor([[found[name] for name in labels]]), want)
    assert any(graph.attention for graph in recorder.graphs)


@pytest.mark.parametrize("merged", [False, True])
def test_lora_adapters(merged: bool):
    peft = pytest.importorskip("peft")
    model, inputs = shrunk("llama", tokens=8)
    plain = logits(model, inputs)
    targets = ["q_proj", "v_proj", "gate_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets)).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    want = logits(adapted, inputs)
    assert (want - plain).abs().max() > 1e-2
    subject = adapted.merge_and_unload() if merged else adapted
    with recording() as recorder:
        run = compiled(subject)
        same(logits(run, inputs), want)
        if not merged:
            with adapted.disable_adapter():
                same(logits(run, inputs), plain)
            same(logits(run, inputs), want)
    assert len(recorder.graphs[0].attention) == 4
    assert recorder.graphs[0].attention[-1].query_rows == "all"


def test_exported_programs():
    model, inputs = shrunk("llama", tokens=8)
    inputs["use_cache"] = False
    want = logits(model, inputs)
    exported = torch.export.export(model, (), inputs, strict=False)
    with recording() as recorder:
        same(logits(compiled(exported.module()), inputs), want)
    assert [site.kind for site in recorder.graphs[0].attention] == 4 * ["causal"]


def test_device_maps_of_one_device():
    accelerate = pytest.importorskip("accelerate")
    model, inputs = shrunk("llama", tokens=8, num_hidden_layers=2)
    want = logits(model, inputs)
    mapped = accelerate.dispatch_model(model, device_map={"": "cpu"}, main_device="cpu")
    with recording() as recorder:
        same(logits(compiled(mapped), inputs), want)
    assert sum(len(graph.attention) for graph in recorder.graphs) == 2


def test_quantised_weights_are_left_to_the_inner_compiler():
    # Not among the test requirements: where it is installed, importing transformers is loud.
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, inputs = shrunk("llama", tokens=8)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    want = logits(model, inputs)
    with recording() as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(logits(compiled(model), inputs), want)
    (graph,) = recorder.graphs
    assert not graph.captured and graph.reason is not None
    assert graph.reason.startswith("tensor-subclass: an input is a Int8Tensor, not a plain")


def _rank(rank: int, port: int, folder: str, results: Any) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    import os

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        whole, inputs = shrunk("llama", tokens=8, num_hidden_layers=2)
        if rank == 0:
            whole.save_pretrained(folder)
        dist.barrier()
        want = logits(whole, inputs)
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
        with recording() as recorder:
            same(logits(compiled(model), inputs), want)
        results[rank] = [graph.reason for graph in recorder.graphs]
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_tensor_parallel_ranks(tmp_path):
    """Two gloo ranks give what one process gives; DTensors are left to the inner compiler."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").Manager().dict()
    mp.spawn(_rank, args=(port, str(tmp_path / "model"), results), nprocs=2)
    for rank in (0, 1):
        assert set(results[rank]) == {"tensor-subclass: an input is a DTensor, not a plain tensor"}
