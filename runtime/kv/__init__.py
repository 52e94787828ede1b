"""The KV cache, bottom up: what layers keep, blocks, block tables, layout, a transformers cache."""
