"""What stands behind `BaseUpdater`. To read a step, start with `transform`.

transform   the step of `wrap_optax`: scores, masks, optimizer, zeros, state
hooks       what an algorithm may define, and what is done if it does not
prunable    `Prunable`, the leaves that an algorithm handles, and how it is made
selecting   from scores to masks
ranking     one ranking over all leaves together
masks       masks applied, held, replaced, and counted
hidden      weights that the state trains and params show otherwise
moments     the optimizer's state, weight by weight
state       `SparseState`, `Category`; a mask applied to a weight
conditional a function that runs now and then inside a compiled step
start       the state of step 0, and Optax's `init`
at_once     pruning without training
seeds       random keys and scores
draw        random numbers by a hash of key, path and index
checks      what is refused, and what is warned of
"""
