"""Many requests served by one model."""
