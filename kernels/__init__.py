"""The ops: schemas, oracles and kernels."""
