"""Algorithms of single papers, kept apart so that the core stays small.

alternating      AC/DC: sparse and dense phases
at_init          SNIP, GraSP, SynFlow: masks before the first step
coupled          neurons, filters and heads, removed together
cram, powerprop  training that prepares for pruning, with `transforms`
decaying         masks that take effect gradually
dynamic          eight sparse trainers, put together from `Rewiring`'s parts
fisher           second-order saliency
imp              iterative pruning with rewinding
movement         movement pruning, hard and soft
soft_threshold   STR: learnt thresholds
top_kast         one mask forward, a larger one backward

`jaxpruner.algorithms` has all of their classes; nothing else there imports
this package.
"""
