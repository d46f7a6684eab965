"""Products with structured weights on TPU and GPU, written in Pallas.

Each file has one format: the product and its derivatives. `kernels` of this
package chooses them when a program is lowered for a platform; on a CPU the same
formats run as plain XLA. Nothing here has run on a device. The tests run the
kernels in interpret mode, with races and out-of-bounds reads detected, against
a dense product, and lower them for both platforms.
"""
