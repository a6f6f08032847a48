"""Plans: a whole call of a model as one call of C++. docs/internals/plan.md has the design and the file."""
