# pyright: strict
"""Tables of JAX's primitives, grouped by their effect on arrays.

A table contains names, as in `eqn.primitive.name`. Analyses form unions of
tables and add single names for which they have a rule. A test compares the
tables with the primitives of the installed JAX.
"""

# One result, whose element at each place is computed from the operands'
# elements at that place; scalar operands count for every place.
ELEMENTWISE = frozenset(
  """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e
  bessel_i1e cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
  digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
  igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p log2
  logistic lt max min mul mulhi name ne neg nextafter not one_minus_square or
  polygamma population_count pow real reduce_precision
  regularized_incomplete_beta rem round rsqrt select_n shift_left
  shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
  stop_gradient sub tan tanh xor zeta""".split()
)

# The results are the operands, in order. `stop_gradient` is among them: it
# changes derivatives, not values.
COPIES = frozenset(
  "copy device_put name optimization_barrier sharding_constraint "
  "stop_gradient".split()
)

# The same elements at another precision.
CASTS = frozenset("convert_element_type reduce_precision".split())

# The elements of one array in another shape: none is lost.
RESHAPES = frozenset("broadcast_in_dim reshape squeeze transpose".split())

# Every element of a result is one of the operand's, at a place that does not
# depend on values.
VIEWS = RESHAPES | frozenset("rev slice split tile unstack".split())

# Elements of the operands at other places, perhaps chosen by values.
MOVES = frozenset(
  "concatenate dynamic_slice dynamic_update_slice gather iota pad sort "
  "stack".split()
)

# Reduce the axes in `params["axes"]`.
REDUCTIONS = frozenset(
  """argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod
  reduce_sum reduce_xor""".split()
)

# Accumulate along `params["axis"]`.
CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())

# Reduce windows of `params["window_dimensions"]`.
WINDOWS = frozenset(
  "reduce_window_max reduce_window_min reduce_window_sum".split()
)

# Sums of products of two operands: removed weights make them cheaper.
PRODUCTS = frozenset("conv_general_dilated dot_general".split())

# Primitives that only wrap a function -> the parameter that holds it.
CALLS = {
  "call": "call_jaxpr",
  "closed_call": "call_jaxpr",
  "custom_jvp_call": "call_jaxpr",
  "custom_vjp_call": "call_jaxpr",
  "eval_jaxpr": "call_jaxpr",
  "jit": "jaxpr",
  "remat2": "jaxpr",
}

# Primitives that run a function several times, or one of several functions.
CONTROL = frozenset("cond scan while".split())

# Known to need their operands whole, or to make numbers of their own.
OPAQUE = frozenset(
  """approx_top_k bitcast_convert_type cholesky custom_linear_solve eig eigh fft
  hessenberg householder_product lu qr random_bits random_fold_in random_gamma
  random_seed random_split random_unwrap random_wrap reduce reduce_window
  rng_bit_generator rng_uniform scatter scatter-add scatter-max scatter-min
  scatter-mul scatter-sub schur select_and_gather_add select_and_scatter
  select_and_scatter_add svd threefry2x32 top_k triangular_solve tridiagonal
  tridiagonal_solve""".split()
)

TABLES = {
  "ELEMENTWISE": ELEMENTWISE,
  "COPIES": COPIES,
  "CASTS": CASTS,
  "RESHAPES": RESHAPES,
  "VIEWS": VIEWS,
  "MOVES": MOVES,
  "REDUCTIONS": REDUCTIONS,
  "CUMULATIVE": CUMULATIVE,
  "WINDOWS": WINDOWS,
  "PRODUCTS": PRODUCTS,
  "CALLS": frozenset(CALLS),
  "CONTROL": CONTROL,
  "OPAQUE": OPAQUE,
}

KNOWN = frozenset[str]().union(*TABLES.values())

# Names that not every supported release has -> the releases that have them.
# All other names exist in JAX 0.10 and in JAX 0.12.
ONLY_IN = {
  "call": "0.10",
  "closed_call": "0.10",
  "eval_jaxpr": "0.12",
  "log2": "0.12",
  "one_minus_square": "0.12",
}
