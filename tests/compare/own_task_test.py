"""Tasks of the user's: functions, modules, streams of batches."""

import functools
import os
import subprocess
import sys
import textwrap

import compare_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpruner
from jaxpruner.compare import (
  cell_run,
  fingerprint,
  modules,
  networks,
  plan,
  streams,
  tasks,
  training,
)
from jaxpruner.compare.cells import Cell

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = (X[:, 0] * X[:, 1] > 0).astype(np.int32)


def draw(seed, step):
  rows = np.random.default_rng((seed, step)).integers(0, len(Y), 16)
  return {"x": X[rows], "y": Y[rows]}


def network(width=16):
  """A plain network; its arguments for `compare.task`."""

  def init(key):
    a, b = jax.random.split(key)
    return {
      "hidden": {"kernel": jax.random.normal(a, (8, width)) / 3},
      "out": {"kernel": jax.random.normal(b, (width, 2)) / 4},
    }

  def apply(params, x):
    return jax.nn.relu(x @ params["hidden"]["kernel"]) @ params["out"]["kernel"]

  def loss(params, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    logits = apply(params, batch["x"] + 0.01 * noise)
    labels = optax.softmax_cross_entropy_with_integer_labels
    return labels(logits, batch["y"]).mean()

  def evaluate(params):
    return {"accuracy": 100 * jnp.mean(apply(params, X).argmax(-1) == Y)}

  return {"init": init, "apply": apply, "loss": loss, "evaluate": evaluate}


def own(**changes):
  values = {
    **network(),
    "batches": draw,
    "steps": 24,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "narrower": lambda factor: network(max(1, round(16 * factor))),
  }
  return tasks.task(**(values | changes))


def train(task, algorithm="magnitude", seeds=2, checkpoint=None, emit=None):
  settings = helpers.settings(task="own", options={}, seeds=seeds)
  with tasks.bound("own", task):
    networks._loaded.cache_clear()
    cell = Cell(algorithm, 0.0 if algorithm == "dense" else 0.5)
    return cell_run.run_cell(
      cell, settings, emit or (lambda _: None), checkpoint
    )


@functools.cache
def built():
  """The compiled functions of `own()` under `magnitude`, two seeds."""
  task, kept = own(), []
  build = training.build

  def keep(*arguments, **options):
    kept.append(build(*arguments, **options))
    raise Stop

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(training, "build", keep)
    with pytest.raises(Stop):
      train(task)
  return kept[0]


class Stop(Exception):
  pass


def train_again(task, **options):
  """Train without compiling: compiling costs far more than running."""
  ready = built()
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(training, "build", lambda *_args, **_options: ready)
    return train(task, **options)


@functools.cache
def trained():
  return train_again(own())


@pytest.mark.parametrize("algorithm", ["magnitude", "snip"])
def test_functions_are_trained_like_any_task(algorithm):
  plain = algorithm == "magnitude"
  found = (trained() if plain else train(own(), algorithm)).record
  assert found.problem == ""
  assert len(found.metrics["accuracy"]) == 2
  assert found.inference_flops_dense == 2 * 16 * (8 * 16 + 16 * 2)


def test_a_streamed_training_is_plain_optax_on_the_same_batches():
  functions = network()
  task = own()
  outcome = train(task, "dense", seeds=1)
  key = jax.random.key(0)
  params = functions["init"](jax.random.fold_in(key, 0))
  loss_key = jax.random.split(jax.random.fold_in(key, 2))[1]
  tx = optax.sgd(0.1, momentum=0.9)
  state = tx.init(params)

  @jax.jit
  def plain(params, state, batch, step):
    grads = jax.grad(functions["loss"])(
      params, batch, jax.random.fold_in(loss_key, step)
    )
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for step in range(24):
    params, state = plain(params, state, draw(0, step), step)
  for name, leaf in (("hidden", params["hidden"]), ("out", params["out"])):
    np.testing.assert_allclose(
      outcome.arrays[f"param:{name}/kernel"], leaf["kernel"], atol=1e-5
    )


def averaging():
  """The network of a script for several devices: means over two axes."""
  functions = network()
  mean = lambda x: jax.lax.pmean(x, ("batch", "rows"))
  return functions | {
    "apply": lambda params, x: mean(functions["apply"](params, x)),
    "loss": lambda params, batch, key: mean(
      functions["loss"](params, batch, key)
    ),
  }


def test_a_mean_over_a_named_axis_is_the_value_itself():
  averaged = train(own(**averaging(), axis_name=("batch", "rows")))
  for name, leaf in trained().arrays.items():
    np.testing.assert_array_equal(leaf, averaged.arrays[name])
  mine, plain = averaged.record, trained().record
  assert mine.metrics == plain.metrics
  assert mine.inference_flops == plain.inference_flops


def test_an_axis_that_nobody_named_is_an_error_with_its_cure():
  task = own(**averaging(), axis_name="rows")
  with pytest.raises(ValueError, match="pass axis_name='batch' to compare"):
    fingerprint._own_task("own", task, task.load(), draw(0, 0))


def test_blocks_of_batches_do_not_change_a_number(monkeypatch):
  whole = trained()
  size = 16 * (8 * 4 + 4) * 2
  monkeypatch.setattr(streams, "BLOCK_BYTES", size)  # one step per block
  cut = train_again(own())
  assert cut.record.metrics == whole.record.metrics
  assert cut.record.batches == whole.record.batches != ""
  for name in whole.arrays:
    np.testing.assert_array_equal(whole.arrays[name], cut.arrays[name])


class Loader:
  """A loader of another library: epochs, shuffled by its own generator."""

  def __init__(self, seed):
    self.rng = np.random.default_rng(seed)

  def __iter__(self):
    order = self.rng.permutation(len(Y))
    for rows in order.reshape(-1, 16):
      yield {"x": X[rows].astype(np.float64), "y": Y[rows].astype(np.int64)}


def test_a_loader_is_iterated_epoch_after_epoch():
  task = own(batches=Loader)
  streams.check(task)
  found = streams.first_batches(task, 0, 0, 12)
  later = streams.first_batches(task, 0, 9, 3)
  for a, b in zip(found[9:], later, strict=True):
    np.testing.assert_array_equal(a["x"], b["x"])
  epochs = [np.concatenate([b["x"] for b in found[i : i + 4]]) for i in (0, 4)]
  assert not np.array_equal(*epochs)  # shuffled anew
  np.testing.assert_array_equal(*(np.sort(e, axis=0) for e in epochs))
  assert found[0]["x"].dtype == np.float32


@pytest.mark.parametrize(
  "batches, reason",
  [
    (
      lambda _seed, _step: {"x": np.random.default_rng().normal(size=(4, 8))},
      r"seed 0, step 0 is not deterministic.*leaf x \(100 % of its values",
    ),
    (lambda seed: iter([draw(seed, 0)]), "step 1 is missing.*repeat the data"),
    (lambda _seed, _step: {"x": np.array(["a"])}, "leaf x is <U1"),
    (lambda _seed, _step: {}, "is empty"),
  ],
)
def test_a_stream_that_breaks_its_contract_is_named(batches, reason):
  with pytest.raises(streams.StreamError, match=reason):
    streams.check(own(batches=batches))


def test_a_stream_that_depends_on_its_start_is_named():
  class Late(tasks.Task):
    def stream(self, seed, step):
      rng = np.random.default_rng((seed, step))
      while True:
        yield {"x": rng.normal(size=3)}

  with pytest.raises(streams.StreamError, match="where the stream starts"):
    streams.check(Late())


def test_a_batch_of_another_shape_is_named():
  ragged = lambda _, step: {
    "x": X[: 16 - (step == 20)],
    "y": Y[: 16 - (step == 20)],
  }
  with pytest.raises(streams.StreamError, match="seed 0, step 20 has other"):
    train(own(batches=ragged))


@pytest.fixture(scope="module")
def drifted(tmp_path_factory):
  """A run of a loader that turns random, without a rule for narrower."""

  def drifting(seed, step):
    rng = np.random.default_rng((seed, step) if step < 5 else None)
    rows = rng.integers(0, len(Y), 16)
    return {"x": X[rows], "y": Y[rows]}

  path = tmp_path_factory.mktemp("drifted")
  return run(path, batches=drifting, narrower=None)


def test_a_loader_that_turns_random_later_fails_its_row(drifted):
  dense, magnitude = drifted.rows
  assert dense.problem == ""
  assert "not deterministic" in magnitude.problem


def run(path, **changes):
  task = own(**changes)
  return jaxpruner.compare.run(
    task,
    algorithms="magnitude",
    sparsity=0.5,
    seeds=2,
    out=str(path / "run"),
    quiet=True,
  )


def test_a_comparison_from_python_is_resumed_and_refuses_other_functions(
  tmp_path,
):
  first = run(tmp_path)
  names = [row.algorithm for row in first.rows]
  assert names == ["dense", "small_dense", "magnitude"]
  assert not any(row.problem for row in first.rows)
  assert (first.path / "report.html").exists()
  before = (first.path / "results.jsonl").read_bytes()
  again = run(tmp_path)
  assert (again.path / "results.jsonl").read_bytes() == before
  for change in (
    {"optimizer": optax.sgd(0.2, momentum=0.9)},
    {"batches": lambda seed, step: draw(seed + 1, step)},
    {"evaluate": lambda _: {"accuracy": 50.0}},
    {"steps": 25},
  ):
    with pytest.raises(jaxpruner.compare.RunFolderError, match="other inputs"):
      run(tmp_path, **change)


def test_without_a_narrower_rule_the_baseline_is_left_out_and_said(drifted):
  assert [row.algorithm for row in drifted.rows] == ["dense", "magnitude"]
  page = (drifted.path / "report.html").read_text()
  assert "<p class='meta'>The small dense baseline is left out" in page


def test_a_task_that_ignores_its_width_has_no_small_baseline():
  class Fixed(tasks.Task):
    def init(self, key):
      return {"w": jax.random.normal(key, (4, 4))}

  with tasks.bound("fixed", Fixed()):
    assert not plan.has_small_dense(helpers.settings(task="fixed", options={}))


def test_the_narrower_network_has_as_many_weights_as_the_sparse_one():
  task = networks.with_width_for(own(), 0.5)
  shapes = jax.eval_shape(task.init, jax.random.key(0))
  assert shapes["hidden"]["kernel"].shape == (8, 8)


def test_a_narrower_network_may_be_a_whole_task():
  narrow = own(narrower=lambda factor: own(**network(round(16 * factor))))
  wide = networks.with_width_for(own(), 0.5)
  found = networks.with_width_for(narrow, 0.5)
  shapes = [jax.eval_shape(t.init, jax.random.key(0)) for t in (wide, found)]
  assert shapes[0] == shapes[1]
  assert found.optimizer() is narrow.optimizer()


def test_the_library_finds_a_narrower_network_of_the_same_functions():
  task = networks.with_width_for(own(narrower="channels"), 0.5)
  params = jax.vmap(task.init)(jax.vmap(jax.random.key)(jnp.arange(200)))
  assert params["hidden"]["kernel"].shape == (200, 8, 8)
  # Half of the inputs, so that twice the variance keeps an output's size.
  whole = jax.vmap(own().init)(jax.vmap(jax.random.key)(jnp.arange(200)))
  ratio = lambda name: float(
    params[name]["kernel"].std() / whole[name]["kernel"].std()
  )
  assert ratio("hidden") == pytest.approx(1.0, abs=0.05)
  assert ratio("out") == pytest.approx(2**0.5, abs=0.05)
  done = train(own(narrower="channels"), "small_dense", seeds=1).record
  assert done.problem == "" and done.weights == 8 * 8 + 8 * 2


def test_a_network_of_fixed_sizes_has_no_narrower_one():
  def fixed(params, x):
    return network()["apply"](params, x) * (params["out"]["kernel"].sum() / 16)

  mean = lambda p, x: (x @ p["hidden"]["kernel"]).reshape(-1, 16).sum() / 16
  task = own(narrower="channels", apply=lambda p, x: fixed(p, x) + mean(p, x))
  with pytest.raises(ValueError, match="narrower='channels': .* narrower=lamb"):
    plan._obeys_width(task)


@pytest.mark.parametrize(
  "changes, reason",
  [
    ({"evalute": 1}, "did you mean 'evaluate'"),
    ({"batches": lambda _a, _b, _c: 1}, "must take"),
    ({"steps": 0}, "steps=0"),
    ({"batching": "seq"}, "auto, map or vmap"),
    ({"init": 3}, "init=3 must be callable"),
    ({"test": []}, "test=.* must be a function"),
    ({"narrower": "width"}, "narrower='width' .* or 'channels'"),
    ({"name": "a:b"}, "without ':'"),
    ({"axis_name": ("batch", 3)}, "need the name of an axis"),
  ],
)
def test_a_wrong_argument_is_named(changes, reason):
  with pytest.raises(ValueError, match=reason):
    own(**changes)


@pytest.mark.parametrize(
  "changes, reason",
  [
    ({"metric": "error"}, "evaluate returned accuracy.*'error'"),
    ({"has_state": True}, r"init must return \(params, state\)"),
    (
      {"batches": lambda _seed, _step: {"z": X, "y": Y}},
      "which part of a batch",
    ),
    (
      {"narrower": lambda _: {"widht": 3}},
      "narrower: unknown key 'widht'",
    ),
  ],
)
def test_a_wrong_function_is_named_before_training(tmp_path, changes, reason):
  with pytest.raises(ValueError, match=reason):
    done = run(tmp_path, **changes)
    problems = [row.problem for row in done.rows if row.problem]
    raise ValueError(problems[0])


def test_jobs_need_a_task_that_another_process_can_import():
  with pytest.raises(ValueError, match="one after another in this one"):
    jaxpruner.compare.run(own(), jobs=2)
  with pytest.raises(ValueError, match="missing argument 'loss'"):
    jaxpruner.compare.run(init=1, apply=1)


def test_state_is_trained_evaluated_and_stored():
  """Batch statistics: a running mean of the inputs, checked with NumPy."""
  base = network()

  def loss(params, state, batch, key):
    mean = 0.9 * state["mean"] + 0.1 * batch["x"].mean(0)
    centred = batch | {"x": batch["x"] - mean}
    return base["loss"](params, centred, key), {"mean": mean}

  task = own(
    init=lambda key: (base["init"](key), {"mean": jnp.zeros(8)}),
    apply=lambda params, state, x: base["apply"](params, x - state["mean"]),
    loss=loss,
    evaluate=lambda _, state: {"accuracy": state["mean"][0]},
    has_state=True,
    narrower=None,
  )
  outcome = train(task, "dense")  # it compiles least
  expected = np.zeros(8)
  for step in range(24):
    expected = 0.9 * expected + 0.1 * draw(0, step)["x"].mean(0)
  np.testing.assert_allclose(outcome.arrays["state:mean"], expected, rtol=1e-4)
  found = outcome.record.metrics["accuracy"][0]
  assert found == pytest.approx(expected[0], rel=1e-4)


def test_evaluation_in_batches_weighs_every_example_alike():
  test = lambda: [{"x": X[:50], "y": Y[:50]}, {"x": X[50:], "y": Y[50:]}]
  apply = network()["apply"]

  def evaluate(params, batch):
    return {
      "accuracy": (apply(params, batch["x"]).argmax(-1) == batch["y"]).mean()
    }

  found = train_again(own(test=test, evaluate=evaluate)).record
  whole = trained().record
  assert 100 * found.metrics["accuracy"][0] == pytest.approx(
    whole.metrics["accuracy"][0], rel=1e-5
  )


def test_a_streamed_training_resumes_in_the_same_bits():
  class Kept:
    arrays = None

    def load(self):
      return self.arrays

    def save(self, arrays):
      self.arrays = arrays

    def set_aside(self, reason):
      raise AssertionError(reason)

  task, kept = own(), Kept()
  whole = trained()

  class Killed(Exception):
    pass

  chunks = []

  def emit(chunk):
    chunks.append(chunk)
    if len(chunks) == 7:
      raise Killed

  clock = iter(range(0, 10**6, 31))  # every chunk is due for a checkpoint
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cell_run.time, "perf_counter", lambda: next(clock))
    with pytest.raises(Killed):
      train_again(task, checkpoint=kept, emit=emit)
  resumed = train_again(task, checkpoint=kept)
  assert resumed.record.batches == whole.record.batches
  for name in whole.arrays:
    np.testing.assert_array_equal(whole.arrays[name], resumed.arrays[name])


def outside(folder, *words, python=sys.executable):
  """Run the command in a folder that holds nothing but the user's module."""
  env = {k: v for k, v in helpers.environment().items() if k != "PYTHONPATH"}
  return subprocess.run(
    [
      os.path.join(os.path.dirname(python), "jaxpruner"),
      "compare",
      "--quiet",
      "--algorithms=magnitude",
      "--sparsity=0.5",
      "--seeds=2",
      *words,
    ],
    cwd=folder,
    env=env,
    capture_output=True,
    text=True,
    timeout=600,
  )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my_task", "READY", "Held"])
def test_a_task_beside_the_user_runs_in_worker_processes(tmp_path, name):
  (tmp_path / "mine.py").write_text(helpers.OWN_TASK)
  words = (f"--task=mine:{name}", "--out=run", "--jobs=2")
  result = outside(tmp_path, *words)
  assert result.returncode == 0, result.stderr
  assert "magnitude" in result.stdout
  results = (tmp_path / "run" / "results.jsonl").read_bytes()
  assert outside(tmp_path, *words).returncode == 0  # nothing is left to do
  assert (tmp_path / "run" / "results.jsonl").read_bytes() == results
  # The report needs no module of the user's.
  from jaxpruner.compare import table

  rows = table.rows(str(tmp_path / "run"))
  assert not any(row.problem for row in rows)
  (tmp_path / "mine.py").write_text(helpers.OWN_TASK + "\n# changed\n")
  changed = outside(tmp_path, *words)
  assert changed.returncode == 1
  assert f"imports mine:{name}=" in changed.stderr


@pytest.mark.slow
def test_a_folder_that_only_installed_the_package_compares_its_own(tmp_path):
  """A fresh environment, from the built package alone."""
  root = helpers.pathlib.Path(jaxpruner.__file__).parents[2]
  subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
  python = str(tmp_path / "venv" / "bin" / "python")
  install = [python, "-m", "pip", "install", "-q"]
  lock = ["-c", str(root / "requirements.lock")]
  subprocess.run([*install, *lock, f"{root}[compare]"], check=True)
  place = tmp_path / "place"
  place.mkdir()
  (place / "mine.py").write_text(helpers.OWN_TASK)
  words = ("--task=mine:my_task", "--set=width=8", "--out=run")
  result = outside(place, *words, python=python)
  assert result.returncode == 0, result.stderr


@pytest.mark.quick
def test_a_typed_module_is_found_beside_the_user(tmp_path, monkeypatch):
  (tmp_path / "typed_here.py").write_text(helpers.OWN_TASK)
  (tmp_path / "needs_more.py").write_text("import not_installed")
  (tmp_path / "broken_here.py").write_text("1 / 0")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", list(sys.path))
  modules.import_task("typed_here:my_task")
  assert tasks.task_options("typed_here:my_task") == {
    "width": 16,
    "steps": 24,
    "batch_size": 16,
    "rate": 0.1,
  }
  assert tasks.make_task("typed_here:my_task", {"steps": 3}).steps == 3
  for name, reason in (
    ("typed_here:my_tusk", "did you mean 'my_task'"),
    ("typed_here:X", "must be a subclass"),
    ("no_such_thing:a", "ModuleNotFoundError.*run the command in its folder"),
    ("needs_more:a", "'not_installed'; the module needs_more was found; inst"),
    ("broken_here:a", "ZeroDivisionError.*broken_here was found"),
  ):
    with pytest.raises(ValueError, match=reason):
      modules.import_task(name)
  with pytest.raises(ValueError, match="no option 'widht'.*did you mean"):
    tasks.make_task("typed_here:my_task", {"widht": 3})


@pytest.mark.quick
def test_a_file_names_a_task_but_does_not_import_it(tmp_path, monkeypatch):
  import argparse

  from jaxpruner.compare import command

  parser = argparse.ArgumentParser()
  command.add_arguments(parser)
  (tmp_path / "planted_task.py").write_text("raise SystemExit('imported')")
  monkeypatch.chdir(tmp_path)
  (tmp_path / "run.toml").write_text('task = "planted_task:T"')
  with pytest.raises(ValueError, match="type --task planted_task:T"):
    command.settings_from(parser.parse_args(["--config", "run.toml"]))
  with pytest.raises(ValueError, match="is not imported"):
    tasks.make_task("planted_task:T")


PRINTED = textwrap.dedent("""
  import jax
  jax.config.update("jax_platforms", "cpu")
  from jaxpruner.compare import fingerprint, modules, streams, tasks
  modules.import_task("hashed_task:my_task")
  task = tasks.make_task("hashed_task:my_task")
  print(fingerprint._own_task("hashed_task:my_task", task, task.load(),
                              streams.check(task)[0]))
""")


def test_the_fingerprint_of_a_task_is_the_same_in_every_process(tmp_path):
  (tmp_path / "hashed_task.py").write_text(helpers.OWN_TASK)
  found = {
    subprocess.run(
      [sys.executable, "-c", PRINTED],
      cwd=tmp_path,
      env=helpers.environment() | {"PYTHONHASHSEED": str(seed)},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for seed in (1, 2)
  }
  assert len(found) == 1 and "program" in found.pop()


def test_the_program_counts_what_the_module_imports():
  """A changed constant elsewhere changes the traced step, not the source."""
  data = own().load()
  first = draw(0, 0)
  hashes = {
    fingerprint._program(own(optimizer=optax.sgd(rate)), data, first)
    for rate in (0.1, 0.2, 0.1)
  }
  assert len(hashes) == 2


FRAMEWORKS = ("linen", "nnx_task", "equinox_task", "haiku_task")


@functools.cache
def page():
  """Run the models of the page on tasks; return its names."""
  import re

  text = helpers.pathlib.Path(__file__).parents[2] / "docs/extending/task.md"
  blocks = re.findall(r"```python\n(.*?)```", text.read_text(), re.DOTALL)
  names: dict = {"__name__": "page"}
  for block in blocks:
    if (
      "compare.register_task" not in block and "ComparisonSettings" not in block
    ):
      exec(block.partition("\n\n\ndone = ")[0], names)
  return names


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_model_of_any_framework_is_compared(name):
  for framework in ("flax", "equinox", "haiku"):
    pytest.importorskip(framework)
  task = page()[name]
  streams.check(task)
  found = train(task).record
  assert found.problem == ""
  np.testing.assert_allclose(found.realised, 0.5, atol=2e-3)
  assert found.inference_flops_dense > 0
  key = "program"
  assert fingerprint._own_task("x", task, task.load(), draw_pair())[key]


def draw_pair():
  batch = draw(0, 0)
  return batch["x"], batch["y"]
