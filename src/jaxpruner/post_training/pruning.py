"""Prune a trained model on a few batches of data, without training."""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpruner import sparsity_distributions
from jaxpruner._tools import fingerprint
from jaxpruner.config import codec
from jaxpruner.post_training import (
  _graph,
  _pattern,
  _stream,
  calibration,
  solve_layer,
)
from jaxpruner.post_training.calibration import ApplyFn, FilterFn, Statistics
from jaxpruner.post_training.contrib import alpha
from jaxpruner.post_training.prune_report import Layer, PruneReport
from jaxpruner.post_training.solvers.table import Solver
from jaxpruner.sparse import _staging, files
from jaxpruner.sparsity_distributions import default_filter, table
from jaxpruner.sparsity_distributions.owl import THRESHOLD
from jaxpruner.sparsity_distributions.table import DISTRIBUTIONS


def prune(
  apply_fn: ApplyFn,
  params: Any,
  batches: Iterable[Any],
  *,
  method: str | Solver | Callable[..., Any] = "sparsegpt",
  sparsity: float | None = None,
  sparsity_type: Any = None,
  filter_fn: FilterFn = default_filter,
  custom_sparsity_map: Mapping[Any, float | None] | None = None,
  allocation: str = "uniform",
  sequential: bool = True,
  refine: int = 0,
  refit: bool = False,
  damping: float = 0.01,
  block_size: int = 128,
  mesh: Any = None,
  data_axis: str = "data",
  donate: bool = False,
  folder: str | os.PathLike | None = None,
  progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Any, Any, PruneReport]:
  """Prune a trained model on a few batches of data, without training.

  `apply_fn` is traced once. Layers are pruned in the order of the forward pass:
  each weight that multiplies activations is pruned on its inputs, and the
  following layers get the outputs of the pruned weight. This takes one forward
  pass; memory holds the parameters in use, one batch and the statistics of one
  layer.

  Args:
    apply_fn: `apply_fn(params, batch)`, from any framework.
    params: its parameters; for `refit` also the statistics of
      normalisations.
    batches: an iterable of batches of equal shapes, read once.
    method: "magnitude"; "wanda", |w| ‖x‖ per output; "sparsegpt", which edits
      the kept weights; "sparsegpt_int8", which also rounds them, to
      `sparse.Int8`; "obc", exact greedy removal for small layers; "alps",
      ADMM, slower and closer to the dense model; "ria", relative
      importance; "sparseswaps", the best swaps of Wanda's mask; a name given to
      `register_solver`; or a solver itself, see `Solver`.
    sparsity: fraction removed; an N:M type implies it.
    sparsity_type: Unstructured, NByM, Block, another type with `on_matrix`, or
      their text form ("2:4", "4x4"). N:M groups always run along the inputs,
      which are known from the trace; `axis` is ignored.
    filter_fn: `(names, param) -> bool`, the leaves to prune.
    custom_sparsity_map: exact path or glob -> the sparsity of these leaves,
      None to keep them dense.
    allocation: "uniform", "erk", "owl" (layers with more outliers are pruned
      less), "alpha" (layers whose spectrum has a heavier tail are pruned less),
      or a name given to `jaxpruner.register_distribution`.
    sequential: calibrate later layers on the outputs of pruned earlier layers;
      False calibrates all layers on the dense model.
    refine: conjugate-gradient steps that re-fit the kept weights under the
      fixed mask.
    refit: correct each bias for the change of the mean output, and measure the
      running statistics of batch normalisations again.
    damping: fraction of the mean diagonal added to the second moments.
    block_size: inputs per panel of SparseGPT.
    mesh: spread batches over this mesh's `data_axis`.
    data_axis: the name of that axis.
    donate: reuse the memory of `params` for the pruned weights; `params` must
      not be used afterwards. Memory holds one model instead of two.
    folder: store finished layers here; the same call continues after them. A
      call with another function, data, method, version or setting of JAX is
      refused, and the error names the difference.
    progress: called with (layers done, number of layers, name).

  Returns:
    `(params, masks, report)`. Masks are uint8, 1 = kept, None where dense.

  Example:
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> params = {"w": rng.normal(size=(8, 4)).astype(np.float32)}
    >>> data = [rng.normal(size=(32, 8)).astype(np.float32)]
    >>> new, masks, report = prune(
    ...   lambda p, x: x @ p["w"], params, data, sparsity_type="2:4")
    >>> int(masks["w"].sum()), report.sparsity
    (16, 0.5)
  """
  settings = solve_layer.Settings(method, damping, block_size, refine)
  kind = codec.parse_sparsity_type(sparsity_type)
  sparsity = getattr(kind, "sparsity", None) if sparsity is None else sparsity
  if sparsity is None:
    raise ValueError("sparsity is missing; give the fraction removed, as 0.5")
  if donate and not sequential:
    raise ValueError(
      "donate=True gives up the dense weights that sequential=False calibrates "
      "on; leave one of them out"
    )
  start = time.perf_counter()
  if allocation == "owl":
    batches = list(batches)
  model = calibration.Model(
    apply_fn, params, batches, filter_fn, mesh, data_axis
  )
  targets = targets_of(model, sparsity, allocation, custom_sparsity_map)
  if allocation == "owl":
    model.batches = map(calibration.flat_batch, batches)
  job = Job(model, targets, kind, settings, refit, sequential, donate)
  if folder is not None:
    job.keep(pathlib.Path(folder))
  job.run(progress or (lambda *_: None))
  seconds = time.perf_counter() - start
  report = PruneReport(tuple(job.layers), model.skipped, seconds)
  return model.tree(job.leaves), model.tree(job.masks, None), report


def targets_of(
  model: calibration.Model, sparsity: float, allocation: str, custom: Any
) -> dict[int, float | None]:
  """Return the sparsity of each leaf that will be pruned."""
  measured = {"owl": _outliers, "alpha": _tails}
  if allocation not in measured and allocation not in DISTRIBUTIONS:
    raise ValueError(
      f"allocation={allocation!r} must be 'owl', 'alpha' or one of "
      f"{', '.join(DISTRIBUTIONS)}"
    )
  chosen = sorted({part.leaf for part in model.parts})
  # Keyed by whole paths, so that patterns match them as they do elsewhere.
  shapes = {
    model.name(i): jax.ShapeDtypeStruct(
      model.leaves[i].shape, model.leaves[i].dtype
    )
    for i in chosen
  }
  if allocation in measured:
    tree = sparsity_distributions.owl_by_layer(
      shapes, sparsity, measured[allocation](model), custom
    )
  else:
    given = {"filter_fn": lambda *_: True}
    given["custom_sparsity_map"] = custom
    distribution = DISTRIBUTIONS[allocation]
    known = table.options(distribution)
    if custom and "custom_sparsity_map" not in known:
      raise ValueError(
        f"custom_sparsity_map={custom!r} is not an argument of "
        f"allocation={allocation!r}; drop it"
      )
    options = {key: given[key] for key in given if key in known}
    tree = distribution(shapes, sparsity=sparsity, **options)
  return {i: tree[model.name(i)] for i in chosen}


def _outliers(model) -> dict[str, list[tuple[int, float]]]:
  """Return the sizes and outlier ratios of each weight's parts.

  Scores are Wanda's, |w| ‖x‖. One pass over the batches.
  """
  found: dict[str, list[tuple[int, float]]] = {}
  _, cuts = model.stream(False, False, lambda _: False)
  for cut, sums in cuts:
    for part in cut.parts:
      norm = np.asarray(calibration.statistics(part, sums).norm)
      w, _ = part.matrix(model.leaves[part.leaf])
      scores = w * norm[:, :, None]
      ratio = sparsity_distributions.outlier_ratio(scores, THRESHOLD)
      found.setdefault(model.name(part.leaf), []).append((scores.size, ratio))
  return found


def _tails(model) -> dict[str, list[tuple[int, float]]]:
  """Return the sizes and negative tail exponents of each weight's parts."""
  found: dict[str, list[tuple[int, float]]] = {}
  for part in model.parts:
    w, _ = part.matrix(model.leaves[part.leaf])
    rows = found.setdefault(model.name(part.leaf), [])
    # A spectrum without a tail counts as a light one.
    rows.extend((m.size, -min(alpha.tail_exponent(m), 100.0)) for m in w)
  return found


class Job:
  """One run over all layers whose target is not None.

  Attributes:
    leaves: the parameters' arrays, replaced by pruned ones layer by layer.
    masks: their masks, None where dense.
    layers: what the report says of each layer that is done.
  """

  def __init__(
    self,
    model: calibration.Model,
    targets: Mapping[int, float | None],
    kind: Any,
    settings: solve_layer.Settings,
    refit: bool = False,
    sequential: bool = True,
    donate: bool = False,
  ):
    model.parts = [p for p in model.parts if targets[p.leaf] is not None]
    self._model, self._targets, self._kind = model, targets, kind
    self._settings, self._refit = settings, refit
    self._sequential, self._donate = sequential, donate
    self.leaves = list(model.leaves)
    self.masks: list[Any] = [None] * len(self.leaves)
    self.layers: list[Layer] = []
    self._folder: pathlib.Path | None = None
    self._job = ""
    for part in model.parts:  # wrong types are told before hours of work
      self._pattern(part)

  def _pattern(self, part: _graph.Part) -> _pattern.Pattern:
    leaf = self.leaves[part.leaf]
    at = part.indices(leaf.shape)
    name = self._model.name(part.leaf)
    return _pattern.of(self._kind, at, leaf.shape, part.run_length, name)

  def keep(self, folder: pathlib.Path) -> None:
    """Store finished layers in a folder that belongs to this job only."""
    folder.mkdir(parents=True, exist_ok=True)
    model = self._model
    facts = {
      "settings": self._settings.as_dict(),
      "targets": {model.name(i): s for i, s in self._targets.items()},
      "type": repr(self._kind),
      "refit": self._refit,
      "sequential": self._sequential,
      "function": fingerprint.text(repr(model.program.signature())),
      "weights": fingerprint.arrays(model.leaves),
      "data": None,
      "jax": fingerprint.settings(),
      "versions": fingerprint.versions(),
    }
    if self._settings.needs == "none" and not self._refit:
      _staging.claim(folder, facts)
    else:
      model.batches = self._hashed(folder, facts, model.batches)

  def _hashed(
    self, folder: pathlib.Path, facts: dict[str, Any], batches: Iterable[Any]
  ) -> Iterator[Any]:
    """Pass batches on; claim the folder when all of them are known.

    The stream reads every batch before it asks for a finished layer, so none
    is reused unless the data is that of the layer.
    """
    digest = fingerprint.Digest()
    for batch in batches:
      digest.update(batch)
      yield batch
    self._job = _staging.claim(folder, facts | {"data": digest.hexdigest()})
    self._folder = folder

  def _file(self, cut: _stream.Cut) -> pathlib.Path:
    assert self._folder is not None
    return self._folder / f"cut-{cut.position}.safetensors"

  def _done(self, cut: _stream.Cut) -> bool:
    return self._folder is not None and self._file(cut).exists()

  def run(self, progress: Callable[[int, int, str], None]) -> None:
    model, total = self._model, len(self._model.parts)
    if self._settings.needs == "none" and not self._refit:
      for part in model.parts:
        self.prune(part, None)
        progress(len(self.layers), total, self.layers[-1].name)
      return
    stream, cuts = model.stream(
      self._settings.needs == "gram", self._refit, self._done
    )
    # Closed on an error too: activations wait in a temporary folder.
    with contextlib.closing(cuts):
      for cut, sums in cuts:
        if self._done(cut):
          self._load(cut)
        else:
          before = len(self.layers)
          for part in cut.parts:
            self.prune(part, calibration.statistics(part, sums))
          for norm in cut.norms:
            self._measure(norm, sums)
          if self._folder is not None:
            self._save(cut, self.layers[before:])
        if cut.parts:
          progress(len(self.layers), total, self.layers[-1].name)
        if self._sequential:
          stream.leaves[:] = self.leaves

  def prune(self, part: _graph.Part, seen: Statistics | None) -> None:
    """Replace a weight by the pruned one, given the moments of its inputs."""
    start = time.perf_counter()
    leaf = self.leaves[part.leaf]
    w, at = part.matrix(leaf)
    pattern = self._pattern(part)
    sparsity = self._targets[part.leaf]
    assert sparsity is not None
    new, mask = solve_layer.prune(w, seen, sparsity, pattern, self._settings)
    error = None
    if seen is not None and seen.gram is not None:
      error = float(solve_layer.error(new - w, w, seen.gram))
    if self._refit and part.bias is not None and seen is not None:
      lost = jnp.einsum("gi,gio->o", seen.mean, w - new)
      bias = self.leaves[part.bias]
      moved = np.asarray(bias) + np.asarray(lost).reshape(bias.shape)
      self._put(part.bias, moved)
    old = self.masks[part.leaf]
    full = np.ones(leaf.size, np.uint8) if old is None else old.reshape(-1)
    full[at.reshape(-1)] = np.asarray(mask).reshape(-1)
    flat = np.array(leaf).reshape(-1)
    flat[at.reshape(-1)] = np.asarray(new.astype(leaf.dtype)).reshape(-1)
    self.masks[part.leaf] = full.reshape(leaf.shape)
    self._put(part.leaf, flat.reshape(leaf.shape))
    self.layers.append(
      Layer(
        self._model.name(part.leaf),
        tuple(at.shape[1:] if at.shape[0] == 1 else at.shape),
        1 - float(np.asarray(mask).mean()),
        error,
        time.perf_counter() - start,
      )
    )

  def _put(self, i: int, array: np.ndarray) -> None:
    """Replace a leaf by an array like it."""
    leaf, array = self.leaves[i], array.astype(self.leaves[i].dtype)
    if isinstance(leaf, jax.Array):
      self.leaves[i] = jax.device_put(array, leaf.sharding)
      if self._donate:
        leaf.delete()
    elif self._donate and leaf.flags.writeable:
      leaf[...] = array
    else:
      self.leaves[i] = array

  def _measure(self, norm: _graph.Norm, sums: dict[Any, Any]) -> None:
    count, moments = sums[norm]
    shift = np.asarray(moments.total, np.float64)[0] / count
    var = np.asarray(moments.square, np.float64)[0] / count - shift**2
    mean = np.asarray(self.leaves[norm.mean], np.float64) + shift
    for i, value in ((norm.mean, mean), (norm.var, var)):
      self._put(i, value)

  def _touched(self, cut: _stream.Cut) -> list[int]:
    touched = [p.leaf for p in cut.parts]
    if self._refit:
      touched += [p.bias for p in cut.parts if p.bias is not None]
    touched += [i for n in cut.norms for i in (n.mean, n.var)]
    return sorted(set(touched))

  def _save(self, cut: _stream.Cut, layers: list[Layer]) -> None:
    touched = self._touched(cut)
    files.save(
      self._file(cut),
      {str(i): self.leaves[i] for i in touched},
      {str(i): self.masks[i] for i in touched},
      metadata={
        "job": self._job,
        "layers": [dataclasses.asdict(l) for l in layers],
      },
    )

  def _load(self, cut: _stream.Cut) -> None:
    path = self._file(cut)
    touched = self._touched(cut)
    cure = "delete it, and only this layer is computed again"
    try:
      leaves, masks = files.load(path)
      about = files.read_metadata(path)
    except files.FileFormatError as e:
      raise files.FileFormatError(f"{e}; {cure}") from e
    if about.get("job") != self._job or leaves.keys() != set(map(str, touched)):
      raise files.FileFormatError(f"{path} is a layer of another job; {cure}")
    for i in touched:
      self._put(i, np.asarray(leaves[str(i)]))
      self.masks[i] = masks[str(i)]
    for row in about["layers"]:
      self.layers.append(Layer(**row | {"shape": tuple(row["shape"])}))
