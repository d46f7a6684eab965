"""Orbax: checkpoints with the pruner's configuration, verified on restore.

Orbax restores only the leaves of the template: if the template has `None` where
a mask was saved, the result has `None`, without an error. Here the leaves are
listed when they are saved, each with a hash of its bits, and compared after
restoring.
"""

import contextlib
import dataclasses
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import jaxpruner
from jaxpruner._tools import fingerprint as fingerprints


def fingerprint(pruner: jaxpruner.BaseUpdater) -> str:
  """Return the configuration as JSON text, the same in every process.

  An updater without a configuration, because it holds a function of the user,
  is described field by field, functions by their source.

  Args:
    pruner: the updater.

  Returns:
    JSON text; equal texts mean equal updaters.

  Example:
    >>> json.loads(fingerprint(jaxpruner.NoPruning()))["algorithm"]
    'no_prune'
  """
  try:
    facts = jaxpruner.config_from_updater(pruner)
  except ValueError:
    facts = {"algorithm": type(pruner).__name__}
    if dataclasses.is_dataclass(pruner):
      for field in dataclasses.fields(pruner):
        value = getattr(pruner, field.name)
        facts[field.name] = fingerprints.describe(value)
  return json.dumps(facts, sort_keys=True)


def _is_key(x: Any) -> bool:
  dtype = getattr(x, "dtype", None)
  return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _mix(h: jax.Array) -> jax.Array:
  """Let every bit depend on all others; a bijection of 32-bit words."""
  for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
    h = (h ^ (h >> shift)) * jnp.uint32(factor)
  return h ^ (h >> 16)


def _words(x: Any) -> Any:
  """Return all bits of an array as unsigned words of at most 32 bits."""
  if not isinstance(x, jax.Array):  # on the host: JAX would narrow 64 bits
    x = np.asarray(x)
    width = min(x.dtype.itemsize, 4)
    return np.ascontiguousarray(x).reshape(x.size, 1).view(f"u{width}")
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], -1)
  width = min(x.dtype.itemsize, 4)
  if x.dtype == jnp.bool_ or (
    width == 1 and jnp.issubdtype(x.dtype, jnp.integer)
  ):
    return x.astype(jnp.uint8)  # four-bit integers among them
  if width == 1 and jnp.finfo(x.dtype).bits < 8:
    x, width = x.astype(jnp.float32), 4
  return jax.lax.bitcast_convert_type(x, f"u{width}")


@jax.jit
def _hash(x: Any) -> jax.Array:
  """Return two 32-bit sums over the words, each mixed with its index.

  Integer sums that wrap do not depend on the order of the terms, and so not on
  devices or processes. One changed word always changes the sums.
  """
  x = _words(x)
  place = jnp.zeros((), jnp.uint32)
  stride = 1
  for axis in reversed(range(x.ndim)):
    index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    place = place + index * jnp.uint32(stride % (1 << 32))
    stride *= x.shape[axis]
  x = x.astype(jnp.uint32)
  seeds = (jnp.uint32(0x9E3779B9), jnp.uint32(0x3C6EF372))
  sums = [jnp.sum(_mix(x ^ _mix(place ^ s)), dtype=jnp.uint32) for s in seeds]
  return jnp.stack(sums)


def _summary(leaf: Any) -> str:
  """Return dtype, shape and hash of a leaf, as text."""
  spelled = _shape(leaf)
  if _is_key(leaf):
    leaf = jax.random.key_data(leaf)
  if not isinstance(leaf, jax.Array):
    leaf = _words(leaf)
  high, low = np.asarray(_hash(leaf), np.uint32)
  return f"{spelled} {high:08x}{low:08x}"


def _shape(leaf: Any) -> str:
  dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
  return f"{dtype}{list(np.shape(leaf))}"


def manifest(tree: Any) -> dict[str, str]:
  """Return dtype, shape and a hash of all bits of every leaf, by path.

  Args:
    tree: any pytree of arrays and numbers.

  Returns:
    Path of the leaf -> its dtype, shape and hash, as text.

  Example:
    >>> import numpy as np
    >>> one, other = manifest({"w": 1.0}), manifest({"w": 1.0 + 2**-52})
    >>> one["['w']"].split()[0], one == other
    ('float64[]', False)
  """
  return {
    jax.tree_util.keystr(path): _summary(leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def _plain(tree: Any) -> Any:
  """Return typed PRNG keys as the integers that Orbax can store."""

  def plain(leaf):
    if not _is_key(leaf):
      return leaf
    if isinstance(leaf, jax.Array):
      return jax.random.key_data(leaf)
    return jax.eval_shape(jax.random.key_data, leaf)

  return jax.tree.map(plain, tree)


def _placed(template: Any, params: Any) -> Any:
  """Return the template's shapes, on devices where a step can run.

  `tx.init(params)` makes counts and keys on the default device, and JAX moves
  them as needed. Restored arrays stay on their devices, so arrays that are not
  on all devices of the parameters are replicated on each.
  """
  found = [x.sharding for x in jax.tree.leaves(params) if _sharded(x)]
  home = max(found, key=lambda s: len(s.device_set), default=None)
  if any(not s.device_set <= home.device_set for s in found if home):
    home = None  # parts of the model live on devices of their own
  if isinstance(home, jax.sharding.NamedSharding):
    home = jax.NamedSharding(home.mesh, jax.P())
  elif home is not None and len(home.device_set) > 1:
    devices = np.array(sorted(home.device_set, key=lambda d: d.id))
    home = jax.NamedSharding(jax.sharding.Mesh(devices, ("all",)), jax.P())

  def place(leaf):
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
      return leaf
    sharding = leaf.sharding
    if home is not None and (
      sharding is None or sharding.device_set != home.device_set
    ):
      sharding = home
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree.map(place, template)


def _sharded(x: Any) -> bool:
  return getattr(x, "sharding", None) is not None


class SparseCheckpoints(contextlib.AbstractContextManager):
  """An Orbax checkpoint manager for the parameters and state of a pruner.

  Saves `(params, opt_state)` with the pruner's fingerprint and a manifest.
  Restores them onto the devices of the templates, in one process or several.
  Refuses a checkpoint that another pruner saved, or whose leaves changed.

  Args:
    folder: the folder of the checkpoints.
    pruner: the updater whose state is saved.
    **options: options of `orbax.checkpoint.CheckpointManagerOptions`.

  Example:
    >>> import optax, tempfile
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "static_sparse", "sparsity": 0.75})
    >>> params = {"w": jnp.ones((4, 4))}
    >>> tx = pruner.wrap_optax(optax.sgd(0.1))
    >>> opt_state = tx.init(params)
    >>> folder = tempfile.mkdtemp()
    >>> with SparseCheckpoints(folder, pruner, max_to_keep=3) as checkpoints:
    ...   checkpoints.save(1, params, opt_state)
    ...   params, opt_state = checkpoints.restore(params, tx.init(params))
    True
    >>> int(jaxpruner.find_state(opt_state).masks["w"].sum())
    4
  """

  def __init__(self, folder: Any, pruner: jaxpruner.BaseUpdater, **options):
    self.pruner = pruner
    settings = ocp.CheckpointManagerOptions(**options)
    try:
      self.manager = ocp.CheckpointManager(
        os.path.abspath(folder), options=settings
      )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(
        f"the folder {folder} holds a checkpoint that Orbax cannot list "
        f"({_first_line(error)}): its metadata are damaged; move that "
        "checkpoint away"
      ) from error

  def __exit__(self, *_) -> None:
    self.manager.close()

  def save(self, step: int, params: Any, opt_state: Any) -> bool:
    """Save the parameters and the state of a step.

    Args:
      step: the number of the checkpoint.
      params: the parameters.
      opt_state: the optimizer state, masks included.

    Returns:
      Whether it was saved; the manager's options may skip a step.
    """
    tree = {"params": params, "opt_state": opt_state}
    about = {"pruner": fingerprint(self.pruner), "leaves": manifest(tree)}
    args = ocp.args.StandardSave(_plain(tree))
    return self.manager.save(step, args=args, custom_metadata=about)

  def restore(
    self, params: Any, opt_state: Any, step: int | None = None
  ) -> tuple[Any, Any]:
    """Return `(params, opt_state)` of a step, the last by default.

    Args:
      params: a template: parameters, or their shapes with shardings, on any
        mesh, also on another mesh than they were saved from.
      opt_state: a template: `tx.init(params)`. Arrays that are not on the
        parameters' devices are replicated on each of them.
      step: the number of the checkpoint.

    Returns:
      The restored `(params, opt_state)`.

    Raises:
      ValueError: another pruner saved it, the templates do not fit, or it is
        damaged; the message says which.
    """
    self.manager.wait_until_finished()
    step = self.manager.latest_step() if step is None else step
    if step is None:
      raise FileNotFoundError(f"no checkpoint in {self.manager.directory}")
    template = {"params": params, "opt_state": opt_state}
    leaves = self._read_manifest(step)
    self._check_template(step, template, leaves)
    args = ocp.args.StandardRestore(_placed(_plain(template), params))
    with self._explained(step):
      tree = self.manager.restore(step, args=args)
      tree = jax.tree.map(
        lambda like, x: (
          jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
          if _is_key(like)
          else x
        ),
        template,
        tree,
      )
    found = manifest(tree)
    changed = [path for path in leaves if found.get(path) != leaves[path]]
    if changed:
      raise ValueError(
        f"checkpoint {step}: {min(changed)} was changed since it was saved; "
        f"{self._cure(step)}"
      )
    return tree["params"], tree["opt_state"]

  def _cure(self, step: int) -> str:
    others = [s for s in self.manager.all_steps() if s != step]
    return f"restore an earlier step (there are {others}) or save again"

  @contextlib.contextmanager
  def _explained(self, step: int):
    """Raise a readable error; the error of Orbax stays as its cause."""
    try:
      yield
    except MemoryError:
      raise
    except Exception as error:
      raise ValueError(
        f"checkpoint {step} in {self.manager.directory} cannot be read "
        f"({_first_line(error)}): it is damaged or incomplete; "
        f"{self._cure(step)}"
      ) from error

  def _read_manifest(self, step: int) -> dict[str, str]:
    """Return the list of leaves, if the same pruner saved them."""
    with self._explained(step):
      about = self.manager.metadata(step).custom_metadata
    about = about if isinstance(about, dict) else {}
    saved, mine = about.get("pruner"), fingerprint(self.pruner)
    if saved != mine:
      raise ValueError(
        f"checkpoint {step} was saved by another pruner, {saved}, than {mine}"
        f"{_differing(saved, mine)}; restore it with its own"
      )
    leaves = about.get("leaves")
    if not isinstance(leaves, dict) or not all(
      isinstance(text, str) for text in leaves.values()
    ):
      raise ValueError(
        f"checkpoint {step} in {self.manager.directory} has no list of its "
        f"leaves: it is damaged, or of an older jaxpruner; {self._cure(step)}"
      )
    return leaves

  def _check_template(
    self, step: int, template: Any, leaves: dict[str, str]
  ) -> None:
    """Refuse templates with other paths, shapes or dtypes than those saved."""
    flat = jax.tree_util.tree_flatten_with_path(template)[0]
    mine = {jax.tree_util.keystr(path): _shape(leaf) for path, leaf in flat}
    theirs = {path: text.rpartition(" ")[0] for path, text in leaves.items()}
    for path in sorted(mine.keys() | theirs.keys()):
      if mine.get(path) != theirs.get(path):
        raise ValueError(
          f"checkpoint {step}: {path} is {theirs.get(path, 'missing')} there, "
          f"{mine.get(path, 'missing')} in the template; restore into the "
          "params and tx.init(params) of the model that was saved"
        )


def _first_line(error: Exception) -> str:
  text = (str(error).strip().splitlines() or [""])[0]
  return f"{type(error).__name__}: {text[:200]}"


def _differing(saved: Any, mine: str) -> str:
  """Name what differs between two configurations."""
  try:
    found = json.loads(saved)
  except (TypeError, ValueError):
    return ""
  return f": {'; '.join(fingerprints.differences(found, json.loads(mine)))}"
