"""Graph-rewriting passes, run at compile time."""
