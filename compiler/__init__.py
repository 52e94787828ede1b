"""Graph -> callable: pieces, the inner compiler, what is kept on disk."""
