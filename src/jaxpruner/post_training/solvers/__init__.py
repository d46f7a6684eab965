"""Solvers: prune one weight, given the statistics of its inputs.

magnitude, wanda   rank scores
sparsegpt          remove, and let weights not yet visited make up for it
sparsegpt_int8     the same, and rounds to int8 on the way
obc                the cheapest weight again and again, for small layers
alps               mask and weights together, by ADMM
table              names, and solvers of your own
"""
