"""Read traced programs: one tracer, one evaluator, tables of primitives."""
