"""What stands behind `BaseUpdater`: the state, the prunable leaves, the step.

state       `SparseState`, `Category`; a mask applied to a weight
prunable    `Prunable`, the leaves that an algorithm handles, and how it is made
masks       new masks in a state, and the counts of what they change
ranking     one ranking over all leaves together
moments     the optimizer's state, weight by weight
checks      what is refused, and what is warned of
at_once     the masks of `instant_sparsify`, compiled
transform   the step of `wrap_optax`: start here
"""
