"""What each sparsity type says of itself: names, counts, units, refusals."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpruner
from jaxpruner import sparsity_types
from jaxpruner._tools import registry
from jaxpruner.sparsity_types import _spec, base, masks, transposable

NByM, Block, Channel = jaxpruner.NByM, jaxpruner.Block, jaxpruner.Channel
Transposable = sparsity_types.TransposableNByM
Diagonal, FanIn = sparsity_types.BlockDiagonal, sparsity_types.ConstantFanIn

SPELLED = {
  "unstructured": jaxpruner.Unstructured(),
  "nm_2,4": NByM(2, 4),
  "nm_2,4,-1": NByM(2, 4, -1),
  "nm_2,4,0+1": NByM(2, 4, (0, 1)),
  "nm_2,4,,128": NByM(2, 4, stride=128),
  "nm_1,2,0,3": NByM(1, 2, 0, 3),
  "block_4,8": Block((4, 8)),
  "maxblock_4,8": Block((4, 8), False),
  "channel_0": Channel(0),
  "transposable_2,4": Transposable(2, 4),
  "diagonal_4": Diagonal(4),
  "strided_4": Diagonal(4, True),
  "fan_in_-1": FanIn(),
  "fan_in_0": FanIn(0),
}
SHORT = {"2:4": NByM(2, 4), "4x8": Block((4, 8)), "fan_in": FanIn()}


@pytest.mark.parametrize("spec", [*SPELLED, *SHORT])
def test_a_name_stands_for_one_type(spec):
  kind = {**SPELLED, **SHORT}[spec]
  assert _spec.parse(spec) == kind
  assert _spec.spell(kind) == next(s for s, k in SPELLED.items() if k == kind)


@pytest.mark.parametrize(
  "spec",
  ["", "nm", "nm_2", "nm_2,4,,", "2:", "4x", "4x4x4", "block_4", "channel",
   "channel_0,1", "channel_x", "fan_in_", "fan_in_1,2", "unstructured_1",
   "diagonal", "strided_", "xnm_2,4", "nm_2,4x"],
)  # fmt: skip
def test_what_is_no_name_stands_for_nothing(spec):
  assert _spec.parse(spec) is None


def test_a_type_without_a_name_or_with_a_wrong_one_is_not_spelled():
  @dataclasses.dataclass(frozen=True)
  class Mine(sparsity_types.SparsityType):
    side: int = 3

  with pytest.raises(ValueError, match="Mine has no name in configuration"):
    _spec.spell(Mine())
  register = sparsity_types.register_sparsity_type
  with registry.restored():
    assert register("mine")(Mine) is Mine
    assert _spec.parse("mine") == Mine() and _spec.parse("mine_5") == Mine(5)
    assert _spec.spell(Mine(5)) == "mine_5"
    Mine.spec = lambda _: "mine_9"
    with pytest.raises(ValueError, match="does not give it back"):
      _spec.spell(Mine())
    for wrong in (Mine(), int, "mine"):
      with pytest.raises(ValueError, match="must be a subclass of"):
        register("wrong")(wrong)
    with pytest.raises(ValueError, match="already stands for Block"):
      register("4x4")(Mine)
    with pytest.raises(ValueError, match="already stands for .*NByM"):
      register("nm")(Mine)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_pairwise_sum_adds_halves(size, axis):
  x = np.random.default_rng(size).normal(size=(size, 3, size))
  x = x.astype(np.float32)

  def halves(rows):
    if len(rows) == 1:
      return rows[0]
    half = len(rows) // 2
    return halves(
      [a + b for a, b in zip(rows[:half], rows[half:], strict=True)]
    )

  rows = [*np.moveaxis(x, axis, 0)]
  width = 1 << (len(rows) - 1).bit_length()
  rows += [np.zeros_like(rows[0])] * (width - len(rows))
  assert np.array_equal(base.pairwise_sum(jnp.asarray(x), axis), halves(rows))


# Type, shape -> units, groups, kept weights at 50 %.
COUNTS = [
  (jaxpruner.Unstructured(), (3, 5), 15, 1, 8),
  (Block((2, 2)), (4, 6), 6, 1, 12),
  (Block((2, 2)), (2, 4, 4), 8, 1, 16),
  (Block((2, 2)), (3,), 2, 1, 2),
  (Channel(), (3, 4), 4, 1, 6),
  (Channel(0), (4, 3), 4, 1, 6),
  (NByM(2, 4), (8, 3), 4, 6, 12),
  (FanIn(), (4, 3), 4, 3, 6),
  (FanIn(0), (3, 2, 2), 4, 3, 6),
]


@pytest.mark.parametrize(
  "kind, shape, units, groups, kept", COUNTS, ids=lambda x: str(x)[:20]
)
def test_units_groups_and_kept_weights_are_counted(
  kind, shape, units, groups, kept
):
  assert kind.units(shape) == units
  assert kind.groups(shape) == groups
  assert kind.kept(shape, 0.5) == kept
  scores = np.random.default_rng(0).permutation(math.prod(shape))
  mask = kind.mask(jnp.asarray(scores.reshape(shape), jnp.float32), 0.5)
  assert mask.shape == shape
  if kind != Block((2, 2)) or shape != (3,):  # blocks at the edge are smaller
    assert int(mask.sum()) == kept


def test_a_fan_in_keeps_the_largest_inputs_of_every_neuron():
  scores = np.random.default_rng(1).permutation(24).reshape(2, 3, 4)
  for axis in (0, 1, -1):
    mask = FanIn(axis).mask(jnp.asarray(scores, jnp.float32), 0.5)
    rows = np.moveaxis(scores, axis, 0).reshape(scores.shape[axis], -1)
    kept = np.moveaxis(np.asarray(mask), axis, 0).reshape(rows.shape) == 1
    for row, keep in zip(rows, kept, strict=True):
      assert set(row[keep]) == set(sorted(row)[len(row) - len(row) // 2 :])


@pytest.mark.parametrize("strided", [False, True])
def test_a_diagonal_is_its_pattern_whatever_the_scores(strided):
  kind = Diagonal(2, strided)
  scores = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 6)))
  wanted = [
    [(i % 2 == j % 2) if strided else (i // 2 == j // 3) for j in range(6)]
    for i in range(4)
  ]
  assert np.array_equal(kind.mask(scores, 0.5), [wanted] * 3)
  assert np.asarray(kind.mask(scores, 0.0)).all()
  assert kind.sparsity == 0.5 and Diagonal(4).sparsity == 0.75
  for shape in ((4,), (3, 4), (4, 3)):
    with pytest.raises(ValueError, match="2 diagonal blocks"):
      kind.mask(jnp.ones(shape), 0.5)
  with pytest.raises(ValueError, match="blocks=0"):
    Diagonal(0)


def test_a_transposable_mask_is_the_best_of_all():
  rng = np.random.default_rng(0)
  blocks = rng.normal(size=(2, 6, 3)).astype(np.float32)
  kind = Transposable(1, 3)
  found = np.asarray(kind.mask(jnp.asarray(blocks), kind.sparsity))
  for scores, mask in zip(
    blocks.reshape(4, 3, 3), found.reshape(4, 3, 3), strict=True
  ):
    assert mask.sum(0).tolist() == mask.sum(1).tolist() == [1, 1, 1]
    best = max(
      sum(scores[i, p[i]] for i in range(3))
      for p in itertools.permutations(range(3))
    )
    assert (scores * mask).sum() == pytest.approx(best, abs=1e-5)
  # An infinite score must stay, a minus infinite one go, beside large others.
  scores = np.full((2, 2), 1e4, np.float32)
  scores[0, 1] = np.inf
  assert Transposable(1, 2).mask(scores, 0.5).tolist() == [[0, 1], [1, 0]]
  scores[0, 1] = -np.inf
  assert Transposable(1, 2).mask(scores, 0.5).tolist() == [[1, 0], [0, 1]]
  assert len(transposable.patterns(2)[0]) == 3
  assert len(transposable.patterns(4)[0]) == 24 + 90 + 24 + 1


def test_a_large_transposable_block_keeps_a_permutation_if_it_is_one():
  order = np.random.default_rng(0).permutation(5)
  scores = np.eye(5, dtype=np.float32)[order]
  found = np.asarray(Transposable(1, 5).mask(jnp.asarray(scores), 0.8))
  assert found.sum(0).tolist() == found.sum(1).tolist() == [1] * 5
  # Swaps of pairs end where none is better; half of the best is then sure.
  assert (scores * found).sum() >= 2.5
  two = np.asarray(Transposable(2, 5).mask(jnp.asarray(scores), 0.6))
  assert two.sum(0).tolist() == two.sum(1).tolist() == [2] * 5


REFUSED = [
  (lambda: Block((4,)), "block_shape"),
  (lambda: Block((4, 0)), "block_shape"),
  (lambda: Block((4, True)), "block_shape"),
  (lambda: Block("ab"), "block_shape"),
  (lambda: Block((2, 2), 1), "use_avg_pooling"),
  (lambda: Channel("0"), "axis"),
  (lambda: Channel(True), "axis"),
  (lambda: FanIn(0.5), "axis"),
  (lambda: NByM(0, 4), "n"),
  (lambda: NByM(5, 4), "n=5 exceeds m=4"),
  (lambda: Transposable(1, 2, stride=2), "stride"),
  (lambda: Channel(2).mask(jnp.ones((2, 2)), 0.5), "no axis 2"),
  (lambda: Channel(-3).mask(jnp.ones((2, 2)), 0.5), "no axis -3"),
  (lambda: FanIn(2).mask(jnp.ones((2, 2)), 0.5), "no axis 2"),
  (lambda: Block((2, 2)).mask(jnp.ones(()), 0.5), "a scalar has no blocks"),
  (lambda: Transposable(1, 2).mask(jnp.ones((4, 3)), 0.5), "not divisible"),
  (lambda: Transposable(1, 2).mask(jnp.ones((3, 4)), 0.5), "not divisible"),
  *(
    (lambda k=kind: k.mask(jnp.ones((0, 2)), 0.5), "holds no weights")
    for kind in (jaxpruner.Unstructured(), Block((2, 2)), Channel(), FanIn())
  ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_nonsense_is_refused_by_name(number):
  make, words = REFUSED[number]
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize("value", [True, False, "0.5", None, 1, -0.1, np.nan])
def test_a_sparsity_is_a_number_below_one(value):
  with pytest.raises(ValueError, match="0 <= sparsity < 1"):
    base.check_sparsity(value)
  assert base.check_sparsity(np.float32(0.5)) == 0.5
  assert base.check_sparsity(0) == 0.0


def test_types_on_a_matrix():
  kernel, turned = (-2, -1), (-1, -2)
  for kind, on_kernel, on_turned in (
    (jaxpruner.Unstructured(), jaxpruner.Unstructured(), "same"),
    (NByM(2, 4), NByM(2, 4, -2), "same"),
    (NByM(2, 4, -1), NByM(2, 4, -2), "same"),
    (NByM(2, 4, stride=2), None, "same"),
    (Block((2, 3)), Block((2, 3)), Block((3, 2))),
    (Block((2, 3), False), Block((2, 3), False), Block((3, 2), False)),
    (Transposable(2, 4), Transposable(2, 4), "same"),
    (Channel(), None, "same"),
    (Diagonal(2), None, "same"),
  ):
    assert kind.on_matrix(kernel) == on_kernel
    assert kind.on_matrix(turned) == (
      on_kernel if on_turned == "same" else on_turned
    )
  assert Block((2, 3)).on_matrix(None) is None
  assert Transposable(2, 4).on_matrix(None) is None
  together = [k.inputs_together for k in (NByM(2, 4), Block((2, 3)), Channel())]
  assert together == [4, 2, 1]


def test_layers_of_stacks_are_selected_as_if_alone():
  rng = np.random.default_rng(0)
  units = [jnp.asarray(rng.normal(size=6), jnp.float32) for _ in range(6)]
  units[4] = units[4].at[0].set(jnp.nan)
  ones = [1, 2, 3, 4, 5, 2]
  # Two stacks of two layers, and two leaves besides, out of order.
  found = masks.select_units(units, ones, stacks=[(0, 3), (1, 4)])
  for scores, count, mask in zip(units, ones, found.masks, strict=True):
    order = np.argsort(-np.nan_to_num(scores, nan=-9), kind="stable")
    assert set(np.flatnonzero(mask)) == set(order[:count].tolist())
  assert found.finite.tolist() == [True] * 4 + [False, True]
  assert found.hint is None


def test_types_with_and_without_groups_are_selected_together():
  kinds = [NByM(1, 2, 0), jaxpruner.Unstructured(), Channel(0)]
  scores = [
    jnp.array([[1.0], [2.0], [4.0], [3.0]]),
    jnp.array([3.0, jnp.inf, 1.0, 2.0]),
    jnp.array([[1.0, 1.0], [2.0, 2.0]]),
  ]
  found = masks.select_masks(kinds, scores, [0.5, 0.25, 0.5], hint="kept")
  assert [np.ravel(m).tolist() for m in found.masks] == [
    [0, 1, 1, 0], [1, 1, 0, 1], [0, 0, 1, 1],
  ]  # fmt: skip
  assert found.finite.tolist() == [True, False, True]
  assert found.hint == "kept"
  assert all(m.dtype == np.uint8 for m in found.masks)
