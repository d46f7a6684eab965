"""Every product of a weight: pieces, batches, groups, loops, reasons."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpruner import sparse
from jaxpruner.sparse import _parts

RNG = np.random.default_rng(0)


def pruned(*shape, density=0.1):
  mask = RNG.random(shape) < density
  return jnp.asarray(np.where(mask, RNG.standard_normal(shape), 0), "float32")


def normal(*shape):
  return jnp.asarray(RNG.standard_normal(shape), "float32")


def prefer_sparse(thunks):
  """Run everything once; prefer the compiled format, and the whole function."""
  for thunk in thunks.values():
    jax.block_until_ready(thunk())
  return {name: 1.0 if name in ("sell", "sparse") else 9.0 for name in thunks}


def run(model, params, *inputs):
  fast, report = sparse.accelerate(
    model, params, *inputs, cache=None, timer=prefer_sparse
  )
  # One program compiles faster than its operations one by one.
  right = np.asarray(jax.jit(model)(params, *inputs))
  scale = 4e-6 * np.abs(right).max()
  np.testing.assert_allclose(fast(*inputs), right, rtol=2e-5, atol=scale)
  return fast, {layer.name: layer for layer in report.layers}


def formats(layers):
  return {name: layer.format for name, layer in layers.items()}


def test_a_fused_weight_that_is_sliced_is_packed_in_pieces():
  params = {"qkv": pruned(64, 192), "o": pruned(64, 64)}

  def model(params, x):
    q, k, v = (x @ params["qkv"][:, i * 64 : (i + 1) * 64] for i in range(3))
    return (jnp.tanh(q * k) + v) @ params["o"]

  fast, layers = run(model, params, normal(3, 64))
  assert formats(layers) == {
    "qkv[:, 0:64]": "sell", "qkv[:, 64:128]": "sell",
    "qkv[:, 128:192]": "sell", "o": "sell",
  }  # fmt: skip
  assert isinstance(fast.params["qkv"], _parts.Parts)
  np.testing.assert_array_equal(fast.params["qkv"].todense(), params["qkv"])
  # Its values can be trained.
  x = normal(3, 64)
  weight = fast.params["qkv"]

  def loss(values):
    params = {**fast.params, "qkv": weight.with_values(values)}
    return fast.apply(params, x).sum()

  grads = jax.jit(jax.grad(loss))(weight.values)
  got = jax.jit(weight.with_values(grads).todense)()
  slope = jax.grad(lambda w: model({**params, "qkv": w}, x).sum())
  want = jax.jit(slope)(params["qkv"]) * (np.asarray(params["qkv"]) != 0)
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_split_reshaped_and_indexed_weights_are_packed():
  params = {
    "gate_up": pruned(64, 128), "qkv": pruned(64, 192),
    "layers": pruned(2, 64, 64), "tall": pruned(128, 64),
    "one": pruned(64, 64), "heads": pruned(64, 64),
  }  # fmt: skip

  def model(params, x):
    gate, up = jnp.split(params["gate_up"], 2, axis=1)
    x = jax.nn.silu(x @ gate) * (x @ up)
    fused = params["qkv"].reshape(64, 3, 4, 16)
    q, k = (jnp.einsum("bd,dhk->bhk", x, fused[:, i]) for i in range(2))
    x = (q * k).reshape(x.shape)
    for i in range(2):
      x = jnp.tanh(x @ params["layers"][i])
    x = x @ params["tall"][:64] - x @ params["tall"][64:]
    x = (x[:, None] @ params["one"][None])[:, 0]
    return jnp.einsum("bhk,hkd->bd", x.reshape(-1, 4, 16),
                      params["heads"].reshape(4, 16, 64))  # fmt: skip

  _, layers = run(model, params, normal(3, 64))
  dense = {name for name, layer in layers.items() if layer.format == "dense"}
  assert dense == {"qkv[:, 128:192]"}
  assert "not used" in layers["qkv[:, 128:192]"].rule


def test_concatenated_kernels_are_multiplied_one_by_one():
  params = {n: pruned(64, 64) for n in "qkv"} | {
    n: pruned(64, 64) for n in "ab"
  }

  def model(params, x):
    fused = jnp.concatenate([params[n] for n in "qkv"], axis=1)
    q, k, v = jnp.split(x @ fused, 3, axis=-1)
    tall = jnp.concatenate([params["a"], params["b"].T])
    return jnp.concatenate([q * k, v], -1) @ tall

  _, layers = run(model, params, normal(3, 64))
  assert set(formats(layers).values()) == {"sell"}


def test_experts_are_packed_one_by_one():
  params = {"up": pruned(4, 64, 96), "down": pruned(4, 96, 64)}

  def model(params, x):
    hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", x, params["up"]))
    return jnp.einsum("ecf,efd->ecd", hidden, params["down"])

  _, layers = run(model, params, normal(4, 5, 64))
  assert len(layers) == 8
  assert set(formats(layers).values()) == {"sell"}


@pytest.mark.parametrize("sizes", [(3, 0, 40, 7), (0, 0, 0, 50), (2, 1, 0, 3)])
def test_ragged_products_use_each_row_once(sizes):
  weight = pruned(4, 64, 96)

  def model(params, x, sizes):
    return jax.lax.ragged_dot(x, params, sizes)

  x, sizes = normal(50, 64), jnp.asarray(sizes, jnp.int32)
  fast, layers = run(model, weight, x, sizes)
  assert set(formats(layers).values()) == {"sell"}
  slope = lambda f, w: jax.jit(jax.grad(lambda x: (f(w, x, sizes) ** 2).sum()))
  got, want = slope(fast.apply, fast.params)(x), slope(model, weight)(x)
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def conv(x, w, groups=1):
  return jax.lax.conv_general_dilated(
    x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
    feature_group_count=groups,
  )  # fmt: skip


def test_convolutions_in_groups():
  params = {
    "few": pruned(3, 3, 24, 64), "many": pruned(3, 3, 4, 64),
    "depthwise": pruned(8, 8, 1, 64),
  }  # fmt: skip

  def model(params, x):
    x = conv(x, params["few"], 2)
    return conv(conv(x, params["many"], 16), params["depthwise"], 64)

  _, layers = run(model, params, normal(1, 5, 5, 48))
  assert layers["few[:, :, :, 0:32]"].format == "sell"
  assert layers["few[:, :, :, 32:64]"].format == "sell"
  assert layers["depthwise"].rule == (
    "depthwise: 64 weights per channel, nothing to gain"
  )
  assert "16 groups: 144 weights in each" in layers["many"].rule


def lstm(params, xs):
  """A cell that joins its kernels in every step, as Flax's fast cell does."""

  def step(carry, x):
    h, c = carry
    kernel = jnp.concatenate([params[f"i{n}"] for n in "ifgo"], -1)
    recurrent = jnp.concatenate([params[f"h{n}"] for n in "ifgo"], -1)
    i, f, g, o = jnp.split(x @ kernel + h @ recurrent, 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

  start = jnp.zeros((xs.shape[1], 64)), jnp.zeros((xs.shape[1], 64))
  return jax.lax.scan(step, start, xs)[0][0]


def test_recurrent_scans_over_data():
  params = {f"{k}{n}": pruned(64, 64) for k in "ih" for n in "ifgo"}
  _, layers = run(lstm, params, normal(5, 2, 64))
  assert set(formats(layers).values()) == {"sell"}


def test_branches_and_loops_are_entered():
  params = {"then": pruned(64, 64), "loop": pruned(64, 64)}

  def model(params, x, n):
    x = jax.lax.cond(
      n > 1, lambda x: x @ params["then"], lambda x: jnp.sin(x), x
    )
    return jax.lax.while_loop(
      lambda c: c[0] < n,
      lambda c: (c[0] + 1, jnp.tanh(c[1] @ params["loop"])),
      (0, x),
    )[1]

  fast, layers = run(model, params, normal(2, 64), jnp.asarray(3))
  assert formats(layers) == {"then": "sell", "loop": "sell"}
  x = normal(2, 64)
  want = jnp.sin(x)
  np.testing.assert_allclose(fast(x, jnp.asarray(0)), want, rtol=1e-6)


def test_experts_in_a_scanned_stack():
  stack = {"up": pruned(2, 3, 64, 64), "qkv": pruned(2, 64, 128)}

  def model(params, x):
    def layer(x, w):
      x = jnp.tanh(jnp.einsum("ecd,edf->ecf", x, w["up"]))
      return x @ w["qkv"][:, :64] + jnp.sin(x @ w["qkv"][:, 64:]), None

    return jax.lax.scan(layer, x, params)[0]

  _, layers = run(model, stack, normal(3, 2, 64))
  assert len(layers) == 5
  assert set(formats(layers).values()) == {"sell"}


def test_reasons_say_what_to_do():
  params = {
    "normed": pruned(64, 64), "pair": pruned(64, 64), "mate": pruned(64, 64),
    "both": pruned(64, 64), "ways": pruned(64, 64), "laps": pruned(64, 128),
  }  # fmt: skip

  def model(params, x):
    x = x @ (params["normed"] / jnp.linalg.norm(params["normed"]))
    x = x @ (params["pair"] @ params["mate"])
    x = x @ params["both"] + (x[:, :32] @ params["both"][:32])
    x = x @ params["ways"][:, :32] @ params["ways"][:32]
    return x @ params["laps"][:, :96] @ jnp.ones((96, 32)) + (
      x @ params["laps"][:, 64:96]
    )

  _, layers = run(model, params, normal(2, 64))
  assert set(formats(layers).values()) == {"dense"}
  rules = {name: layer.rule for name, layer in layers.items()}
  assert "changed by div before it is used" in rules["normed"]
  assert "do it once" in rules["pair"] and "another weight" in rules["mate"]
  assert rules["both"] == "used whole and in pieces"
  assert rules["ways"] == "sliced along different axes"
  assert rules["laps"] == "sliced into pieces that overlap"
  for rule in rules.values():
    assert "dot_general" not in rule


def test_pieces_survive_a_file(tmp_path):
  pytest.importorskip("flatbuffers")
  params = {"up": pruned(2, 64, 96), "kv": pruned(64, 128)}

  def model(params, x):
    x = x @ params["kv"][:, :64] * (x @ params["kv"][:, 64:])
    return jnp.einsum("ecd,edf->ecf", x, params["up"])

  x = normal(2, 3, 64)
  fast, _ = run(model, params, x)
  fast.save(tmp_path / "model.jaxpruner")
  for dense in (False, True):
    loaded = sparse.load_model(tmp_path / "model.jaxpruner", dense=dense)
    np.testing.assert_allclose(loaded(x), fast(x), rtol=2e-5, atol=2e-5)


def test_reshapes_are_grouped():
  assert _parts.regroup((6, 4), (2, 3, 4)) == [([0], [0, 1]), ([1], [2])]
  assert _parts.regroup((1, 6), (6, 1, 1)) == [([1], [0])]
  assert _parts.regroup((4, 6), (8, 3)) == [([0, 1], [0, 1])]
