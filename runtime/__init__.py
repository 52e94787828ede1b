"""What runs at call time."""
