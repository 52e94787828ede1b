"""Reading attention out of plain ops."""
