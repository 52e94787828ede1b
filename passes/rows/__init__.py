"""Which rows of a value somebody reads."""
