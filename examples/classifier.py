"""Classifiers read one row: the last layers of the rest are not computed.

    python examples/classifier.py            # a small BERT, and a Qwen3 pooled at its last token

BERT's head reads the first row; a decoder's the last one that is not padding, another in each row
of the batch. No model is told apart by name: the gather in the graph says which rows are needed.
"""

import argparse

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from kvtailor.backend import recording

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "num_labels": 3,
}


def classify(model: torch.nn.Module, inner: str) -> None:
    ids = torch.randint(2, 128, (2, 20))
    mask = torch.ones_like(ids)
    # The second text is shorter.
    ids[1, 12:], mask[1, 12:] = 0, 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.compile(backend="kvtailor", options={"inner": inner})
        with recording() as recorder:
            actual = model(ids, attention_mask=mask).logits
    print(f"{type(model).__name__}: classes {actual.argmax(-1).tolist()}")
    print(f"  largest difference from eager: {(actual - expected).abs().max():.1e}")
    for site in recorder.graphs[0].attention:
        print(f"  {site.site}: {site.kind}, queries {site.query_rows}, keys {site.key_rows}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inner", choices=("inductor", "eager"), default="eager")
    inner = parser.parse_args().inner
    torch.manual_seed(0)
    classify(BertForSequenceClassification(BertConfig(**SIZES)).eval(), inner)
    decoder = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    classify(Qwen3ForSequenceClassification(decoder).eval(), inner)


if __name__ == "__main__":
    main()
