"""The KV cache: specs, blocks, managers, layout, and a transformers cache over them."""
