"""Dynamo's graph as a functional ATen graph."""
