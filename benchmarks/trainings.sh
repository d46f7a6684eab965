#!/usr/bin/env bash
# The trainings behind docs/results/records, the most telling first.
#
#     cd benchmarks && RUNS=/some/folder bash trainings.sh [NAME ...]
#
# trains what has no file of records yet, or the named comparisons of it. Kill it
# at any time; called again, it goes on where it stopped. Each comparison that is
# finished becomes a file of records; then `rewiring.py`, `table1.py`,
# `scaling_law.py --records` and `cited.py` write the pages. SEED=5 means seeds
# 5, 6, ... of a comparison that exists: none of its cells is trained again.
set -u
RUNS=${RUNS:-runs} RECORDS=${RECORDS:-../docs/results/records} JOBS=${JOBS:-2}
PYTHON=${PYTHON:-python} SEED=0
WANTED=" $* "
one() {
  local name=$1
  shift
  [[ $WANTED == "  " || $WANTED == *" $name "* ]] || return 0
  [[ -e $RECORDS/$name.jsonl ]] && return 0
  echo "$(date -u +%T) $name"
  JAX_RANDOM_SEED_OFFSET=$SEED $PYTHON -m jaxpruner compare --quiet \
    --jobs "$JOBS" --out "$RUNS/$name" "$@" >"$RUNS/$name.log" 2>&1 &&
    $PYTHON -m jaxpruner records "$RUNS/$name" \
      --save "$RECORDS/$name.jsonl" >>"$RUNS/$name.log" 2>&1 ||
    echo "$(date -u +%T) $name failed: $RUNS/$name.log"
}
mkdir -p "$RUNS" "$RECORDS"
GROWING="--algorithms static_sparse,set,rigl,signal_rigl"
PAPER="random,saliency,magnitude_ste,global_magnitude,static_sparse,set,rigl"
COLUMNS="--algorithms magnitude,$PAPER,signal_rigl --sparsity 0.8"
MOMENTUM="--optimizer momentum --set learning_rate=0.05"
LAW="--task speeches:Speeches --algorithms magnitude --seeds 1"
SCALED="--task scaled_speeches:ScaledSpeeches --algorithms magnitude --seeds 1"
SPEECHES="--task speeches:Speeches --set width=32 --set context=32 --set learning_rate=0.006 --steps 1600"
SMALL="--task fashion --set width=8 --steps 600"

# Published.
one digits-80-adam --task digits --sparsity 0.8 --seeds 5
one fashion-mlp-80-adam --task fashion-mlp --sparsity 0.8 --seeds 5
one fashion-mlp-90-adam --task fashion-mlp $GROWING --sparsity 0.9 --seeds 5
one fashion-mlp-90-momentum --task fashion-mlp $GROWING --sparsity 0.9 --seeds 5 $MOMENTUM
one speeches-law $LAW --sparsity 0.5,0.75,0.875 --set width=16,32,64 --set steps=300,600,1200
one speeches-larger $LAW --sparsity 0.75 --set width=96 --set steps=1800
one digits-90-adam --task digits $GROWING --sparsity 0.9 --seeds 20
one digits-98-adam --task digits $GROWING --sparsity 0.98 --seeds 10
one fashion-mlp-98-adam --task fashion-mlp --steps 5000 $GROWING --sparsity 0.98 --seeds 5

# Further: some minutes to an hour of a core each.
one speeches-scaled-law $SCALED --sparsity 0.5,0.75,0.875 --set width=12,24,48 --set steps=400,800,1600
one speeches-scaled-larger $SCALED --sparsity 0.75 --set width=64 --set steps=2400
SEED=5 one fashion-mlp-98-adam-5 --task fashion-mlp --steps 5000 $GROWING --sparsity 0.98 --seeds 10
SEED=5 one digits-80-adam-5 --task digits $COLUMNS --seeds 15
SEED=5 one fashion-mlp-90-adam-5 --task fashion-mlp $GROWING --sparsity 0.9 --seeds 5
one speeches-80-adam $SPEECHES $COLUMNS --seeds 5
SEED=5 one fashion-mlp-80-adam-5 --task fashion-mlp $COLUMNS --seeds 5
one digits-90-momentum --task digits $GROWING --sparsity 0.9 --seeds 10 $MOMENTUM
one digits-90-adamw --task digits $GROWING --sparsity 0.9 --seeds 10 --optimizer adamw
one fashion-80-adam $SMALL $COLUMNS --seeds 5
SEED=5 one fashion-mlp-90-momentum-5 --task fashion-mlp $GROWING --sparsity 0.9 --seeds 5 $MOMENTUM

# To the plateau: hours. cifar10 and dqn-minatar at their own lengths.
one cifar10-80-adam --task cifar10 $COLUMNS --seeds 3
one cifar10-vit-80-adam --task cifar10-vit $COLUMNS --seeds 3
one sotu-80-adam --task sotu $COLUMNS --seeds 3
one fed-fashion-80-adam --task fed-fashion $COLUMNS --seeds 3
one dqn-minatar-98-adam --task dqn-minatar --algorithms magnitude,$PAPER,signal_rigl --sparsity 0.98 --seeds 5
