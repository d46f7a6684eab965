"""Products with structured weights on TPU and GPU, written in Pallas.

Each file has one format: the product, its derivatives, and the bytes it moves.
`jaxpruner.sparse.kernels` chooses them when a program is lowered for a
platform; on a CPU the same formats run as plain XLA. Nothing here has run on a
device: the tests run the kernels in interpret mode, with out-of-bounds reads and
races detected, against a dense product, and lower them for both platforms.
"""
