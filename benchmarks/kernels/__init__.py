"""Coefficients of kernels, fitted to measured kernels that others published.

    python -m benchmarks.kernels           # write catalogue/kernels.toml, print the errors
    python -m benchmarks.kernels --check   # say whether the file is what the tables give

The tables are read from ../shared/validation/kernels, outside the project. One file per form:
`attention`, `products` (matmuls and grouped matmuls), `moved` (element-wise operations, casts and
losses), `collectives` and `dispatch`. The forms themselves are those of `shardwise.spec.kernels`.
"""
