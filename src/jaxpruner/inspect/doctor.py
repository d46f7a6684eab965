"""The doctor: run a training setup for a few steps and report mistakes.

Some mistakes in the use of a pruner raise no error, and the trained model is
dense. `check` runs the parts of the training loop and checks their results.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpruner import _leaves, base_updater
from jaxpruner.updater.state import PyTree, SparseState, find_state, unpack_mask

# A schedule without an end is followed this far.
_HORIZON = 1 << 16
# Accumulating wrappers pass on one step of several.
_PATIENCE = 64
# After these findings the state cannot be checked further.
_FATAL = ("params not passed", "update fails")

_Say: TypeAlias = Callable[[str, str], None]


class Finding(NamedTuple):
  """One mistake in a training setup, with its cure.

  Attributes:
    name: a short name of the mistake.
    words: the observation, and the cure.

  Example:
    >>> print(Finding("not wrapped", "pass the wrapped transformation"))
    not wrapped: pass the wrapped transformation
  """

  name: str
  words: str

  def __str__(self) -> str:
    return f"{self.name}: {self.words}"


class Checkup(NamedTuple):
  """The result of `check`; `ok` is True if there are no findings.

  Attributes:
    findings: the mistakes, in the order they were found.
    sparsity: fraction of the prunable weights removed at the end.
    steps: number of steps that were run.

  Example:
    >>> print(Checkup((), 0.75, 12))
    12 steps, 75.00% of the prunable weights removed: nothing is wrong
  """

  findings: tuple[Finding, ...]
  sparsity: float
  steps: int

  @property
  def ok(self) -> bool:
    return not self.findings

  def __str__(self) -> str:
    head = (
      f"{self.steps} steps, {self.sparsity:.2%} of the prunable weights removed"
    )
    if self.ok:
      return f"{head}: nothing is wrong"
    return "\n".join([f"{head}, but", *(f"- {f}" for f in self.findings)])


def check(
  tx: optax.GradientTransformation,
  params: PyTree,
  *,
  grads: PyTree | Callable[[PyTree], PyTree] = None,
  step: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] | None = None,
  reload: Callable[[PyTree], PyTree] | None = None,
  eval_params: Callable[[PyTree, PyTree], PyTree] | None = None,
  total_steps: int | None = None,
  max_steps: int = 12,
  pruner: base_updater.BaseUpdater | None = None,
) -> Checkup:
  """Run a few steps of a training setup and report mistakes in words.

  The step count of the pruner is set to the steps at which its schedule updates
  masks, so that a few steps reach the end of a long schedule. The arguments
  are not changed: parameters and states are copied.

  Args:
    tx: the transformation that is passed to the trainer.
    params: the parameters at the start of training.
    grads: gradients, or a function `params -> grads`; random by default.
    step: a custom `(params, opt_state) -> (params, opt_state)`, if the loop
      does more than `tx.update` and `optax.apply_updates`.
    reload: a function that saves an optimizer state and returns the restored
      one.
    eval_params: `(params, opt_state) -> params` for evaluation: an average, a
      target network, a cast copy.
    total_steps: the number of training steps; the schedule must end by then.
    max_steps: the largest number of steps to run.
    pruner: the updater inside `tx`, if it cannot be found in `tx`.

  Returns:
    The findings; `ok` is True if there are none, and `print` shows them.

  Example:
    >>> import jax.numpy as jnp, jaxpruner, optax
    >>> pruner = jaxpruner.create_updater_from_config(
    ...   {"algorithm": "magnitude", "sparsity": 0.75, "total_steps": 1000})
    >>> params = {"w": jnp.arange(16.0).reshape(4, 4) - 8}
    >>> tx = optax.chain(
    ...   pruner.wrap_optax(optax.sgd(0.1)), optax.add_decayed_weights(1e-4))
    >>> print(jaxpruner.check(tx, params).findings[0].name)
    not outermost
  """
  found: list[Finding] = []
  say: _Say = lambda name, words: found.append(Finding(name, words))
  opt_state = _check_init(say, tx, params)
  if opt_state is None:
    return Checkup(tuple(found), 0.0, 0)
  if pruner is None:
    pruner = _find_updater(tx.update)
  _check_start(say, pruner, params, find_state(opt_state))
  visits, last = _visits(pruner, total_steps, max_steps)
  run = step or _plain_step(tx, grads)
  course = before = _Course(params, opt_state, 0, False)
  for count in visits:
    before = course
    course = _advance(say, run, course, count)
    if not course.stopped:
      course = _check_zeros(say, course, step, before.params)
    if course.stopped:
      break
  params, opt_state, done, _ = course
  result = lambda: Checkup(tuple(found), _removed(params, opt_state), done)
  if found and found[-1].name in _FATAL:
    return result()
  state = find_state(opt_state)
  _check_finite(say, state)
  _check_hidden(say, pruner, find_state(before.opt_state), state)
  _check_rise(say, pruner, params, state, last, total_steps)
  if reload is not None:
    _check_reload(say, state, reload(opt_state))
  if eval_params is not None:
    _check_eval(say, eval_params(params, opt_state), state)
  return result()


class _Course(NamedTuple):
  """The state of the trial training; `stopped` if it cannot continue."""

  params: PyTree
  opt_state: PyTree
  done: int
  stopped: bool


def _check_init(
  say: _Say, tx: optax.GradientTransformation, params: PyTree
) -> PyTree:
  """Return the first optimizer state, or None if there is nothing to follow."""
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    opt_state = tx.init(params)
  for warning in caught:
    say("warned at init", str(warning.message))
  states = _states(opt_state)
  if len(states) != 1:
    say(
      "not wrapped",
      f"tx.init(params) holds {len(states)} sparse states, one is needed; pass "
      "the transformation that pruner.wrap_optax(tx) returns, once",
    )
    return None
  if not jax.tree.leaves(states[0].masks):
    say(
      "nothing to prune",
      "no leaf of params has a mask; the distribution's filter_fn leaves all "
      "out, or the params tx sees are hidden by optax.masked or a partition",
    )
    return None
  return opt_state


def _check_start(
  say: _Say, pruner: Any, params: PyTree, state: SparseState
) -> None:
  if (
    pruner is not None
    and pruner.category.start == "sparse-to-sparse"
    and _dense_somewhere(params, state)
  ):
    say(
      "starts dense",
      f"{type(pruner).__name__} trains sparse from the start, params are "
      "dense; call params = pruner.post_gradient_update(params, opt_state) "
      "once after tx.init",
    )


def _advance(say: _Say, run: Any, course: _Course, count: int) -> _Course:
  """Train at one value of the pruner's clock, until the clock advances."""
  params, opt_state, done, _ = course
  for _ in range(_PATIENCE):
    opt_state = _set_clock(opt_state, count)
    try:
      params, opt_state = run(params, opt_state)
    except ValueError as error:
      known = "needs params" in str(error)
      say("params not passed" if known else "update fails", str(error))
      return _Course(params, opt_state, done, True)
    done += 1
    if int(find_state(opt_state).count) != count:
      return _Course(params, opt_state, done, False)
  say(
    "the clock stands still",
    f"{_PATIENCE} steps never advanced the pruner's count; step must "
    "return the new opt_state, and the wrapper must see its updates",
  )
  return _Course(params, opt_state, done, True)


def _check_zeros(
  say: _Say, course: _Course, step: Any, before: PyTree
) -> _Course:
  where = _escaped(course.params, find_state(course.opt_state))
  same = jax.tree.map(np.array_equal, before, course.params)
  if where and all(jax.tree.leaves(same)):
    say(
      "updates not applied",
      f"{where}, and your step returned the params it was given: the pruner "
      "has no effect, because the masks change in the state only; return "
      "optax.apply_updates(params, updates)",
    )
  elif where:
    say(*_why_escaped(course.opt_state, step, where))
  return course._replace(stopped=bool(where))


def _check_finite(say: _Say, state: SparseState) -> None:
  absent = _leaves.is_absent(state.skipped)
  skipped = 0 if absent else int(np.sum(np.asarray(state.skipped)))
  if skipped:
    say(
      "scores not finite",
      f"{skipped} mask updates were refused; "
      "find where gradients or weights become NaN or infinite",
    )


def _check_hidden(
  say: _Say, pruner: Any, before: SparseState, state: SparseState
) -> None:
  """Find masked weights that a straight-through algorithm cannot train."""
  if pruner is None or not pruner.reselects or pruner.is_sparse_gradients:
    return
  rows = zip(
    *(jax.tree.leaves(t) for t in (before.hidden, state.hidden, before.masks)),
    strict=True,
  )
  moved = masked = 0
  for old, new, mask in rows if pruner.master_dtype is None else ():
    if np.shape(mask) != np.shape(new):
      mask = unpack_mask(mask, new)
    out = np.asarray(mask) == 0
    masked += int(out.sum())
    moved += int(np.sum(np.asarray(old)[out] != np.asarray(new)[out]))
  if masked and not moved:
    say(
      "masked weights stand still",
      f"a step changed none of {masked} masked weights in the state, so "
      f"{type(pruner).__name__} has the effect of a fixed mask: their gradient "
      "is zero; take jax.grad at the params themselves, and mask neither the "
      "loss's params nor the gradients",
    )


def _states(tree: PyTree) -> list[SparseState]:
  is_state = lambda node: isinstance(node, SparseState)
  return [s for s in jax.tree.leaves(tree, is_leaf=is_state) if is_state(s)]


def _find_updater(function: Any, depth: int = 12) -> Any:
  """Return the updater that a transformation closes over, or None."""
  if isinstance(function, base_updater.BaseUpdater):
    return function
  if depth == 0:
    return None
  inside: list[Any] = []
  for cell in getattr(function, "__closure__", None) or ():
    try:
      inside.append(cell.cell_contents)
    except ValueError:  # not yet assigned
      continue
  if isinstance(function, tuple | list):
    inside.extend(function)
  elif isinstance(function, dict):
    inside.extend(function.values())
  elif hasattr(function, "__self__"):  # a method of MultiSteps, say
    inside.extend(getattr(function.__self__, "__dict__", {}).values())
  found = (_find_updater(value, depth - 1) for value in inside)
  return next((updater for updater in found if updater is not None), None)


def _plain_step(tx, grads):
  extra: Any = optax.with_extra_args_support(tx)

  @jax.jit
  def run(params, opt_state):
    if grads is None:
      # Of the weights' own scale, and different at each step.
      key = jax.random.fold_in(jax.random.key(0), find_state(opt_state).count)
      given = jax.tree.map(
        lambda p: (
          0.01 * jax.random.normal(key, jnp.shape(p), jnp.float32)
        ).astype(p.dtype),
        params,
      )
    else:
      given = grads(params) if callable(grads) else grads
    updates, opt_state = extra.update(given, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return run


def _visits(pruner, total_steps, max_steps) -> tuple[list[int], int | None]:
  """Return the steps to run, and the last at which the schedule is due."""
  if pruner is None:
    return list(range(max_steps)), None
  scheduler = pruner.scheduler
  end = getattr(scheduler, "update_end_step", None)
  horizon = max(end or 0, getattr(scheduler, "target_step", 0)) + 1
  if end is None and not hasattr(scheduler, "target_step"):
    horizon = total_steps or _HORIZON
  steps = np.arange(horizon)
  hits = np.broadcast_to(scheduler.is_mask_update_iter(steps), steps.shape)
  due: list[int] = steps[hits].tolist()
  if not due:
    return [0, 1], None
  spread = np.linspace(0, len(due) - 1, min(len(due), max_steps - 3))
  chosen = {0, 1, due[-1] + 1, *(due[int(i)] for i in spread)}
  return sorted(chosen), due[-1]


def _set_clock(opt_state: PyTree, count: int) -> PyTree:
  is_state = lambda node: isinstance(node, SparseState)
  return jax.tree.map(
    lambda node: (
      node._replace(count=jnp.full_like(node.count, count))
      if is_state(node)
      else node
    ),
    opt_state,
    is_leaf=is_state,
  )


def _masked(params: PyTree, state: SparseState):
  """Yield name, parameter and NumPy mask of every pruned leaf."""
  for (names, param), mask in zip(
    _leaves.flatten_with_names(params)[0],
    _leaves.align(params, state.masks),
    strict=True,
  ):
    if mask is not None:
      if np.shape(mask) != np.shape(param):
        mask = unpack_mask(mask, param)
      yield _leaves.join(names), np.asarray(param), np.asarray(mask)


def _escaped(params: PyTree, state: SparseState) -> str:
  """Name a leaf whose pruned weights are not zero, and how many are not."""
  for name, param, mask in _masked(params, state):
    count = np.count_nonzero(param[mask == 0])
    if count:
      return f"{count} pruned weights of {name!r} are not zero"
  return ""


def _dense_somewhere(params: PyTree, state: SparseState) -> bool:
  # Masks may be drawn from the parameters: those of a second init differ.
  return any(
    np.count_nonzero(param) > np.count_nonzero(mask)
    for _, param, mask in _masked(params, state)
  )


def _why_escaped(opt_state, step, where: str) -> Finding:
  if isinstance(opt_state, tuple) and not isinstance(opt_state, SparseState):
    kinds = [type(s).__name__ for s in opt_state]
    holder = next(i for i, s in enumerate(opt_state) if _states(s))
    if not hasattr(opt_state, "_fields") and holder + 1 < len(kinds):
      return Finding(
        "not outermost",
        f"{where} after a step: {', '.join(kinds[holder + 1 :])} is chained "
        "after the wrapper; wrap the whole chain, pruner.wrap_optax("
        "optax.chain(…))",
      )
  if step is not None:
    return Finding(
      "weights come back",
      f"{where} after your step: something changes params besides "
      "optax.apply_updates (decay, averaging, clipping); put it inside the "
      "wrapped chain, or call pruner.post_gradient_update(params, opt_state) "
      "after it",
    )
  return Finding(
    "not outermost",
    f"{where} after a step: something around the wrapper changes its updates; "
    "make pruner.wrap_optax(…) the outermost transformation",
  )


def _removed(params: PyTree, opt_state: PyTree) -> float:
  ones = size = 0
  for _, _, mask in _masked(params, find_state(opt_state)):
    ones, size = ones + int(np.count_nonzero(mask)), size + mask.size
  return 1 - ones / size if size else 0.0


def _check_rise(say, pruner, params, state, last, total_steps) -> None:
  targets = jax.tree.leaves(state.target_sparsities)
  masks = [mask for _, _, mask in _masked(params, state)]
  kept = sum(int(np.count_nonzero(mask)) for mask in masks)
  size = sum(mask.size for mask in masks)
  if not any(float(t) > 0 for t in targets):
    words = "every target sparsity is 0; say sparsity=0.8"
  elif kept == size:
    words = "the masks are all ones after every step that was run; "
    words += (
      "give the pruner a schedule, such as sparsity_schedules."
      "PolynomialSchedule(…), or total_steps in the configuration"
      if pruner is not None and last is None
      else "run more steps (max_steps), or pass pruner= so that its schedule "
      "can be followed"
    )
  else:
    words = ""
  if words:
    say("sparsity never rises", words)
  if total_steps is not None and last is not None and last >= total_steps:
    say(
      "training ends too soon",
      f"the schedule's last update is at step {last}, training stops before, "
      f"at {total_steps}; end the schedule earlier (total_steps in the "
      "configuration fits it), or count the steps tx sees (optax.MultiSteps "
      "outside the wrapper passes on one of several)",
    )


def _check_reload(say, state: SparseState, restored: PyTree) -> None:
  again = _states(restored)
  cure = "save the whole opt_state, restore into that of tx.init(params)"
  if len(again) != 1:
    say("masks not restored", f"the restored state has no masks; {cure}")
    return
  old = jax.tree_util.tree_flatten_with_path(state._replace(inner_state=None))
  new = jax.tree_util.tree_flatten_with_path(
    again[0]._replace(inner_state=None)
  )
  table = dict(new[0])
  for path, leaf in old[0]:
    name = _leaves.join(_leaves.path_names(path))
    if path not in table:
      words = f"{name} is gone"
    elif np.asarray(table[path]).dtype != np.asarray(leaf).dtype:
      words = f"{name} came back as {np.asarray(table[path]).dtype}"
    elif not np.array_equal(np.asarray(table[path]), np.asarray(leaf)):
      words = f"{name} came back with other values"
    else:
      continue
    say("masks not restored", f"{words}; {cure}")
    return


def _check_eval(say, params: PyTree, state: SparseState) -> None:
  try:
    where = _escaped(params, state)
  except ValueError as error:
    say("other eval params", str(error))
    return
  if where:
    say(
      "dense eval params",
      f"{where} in the parameters you evaluate with; evaluate "
      "pruner.post_gradient_update(copy, opt_state)",
    )
