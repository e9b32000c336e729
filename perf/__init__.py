"""Benchmarks. Each prints the ceiling beside the figure and ends with one JSON line; results/ keeps the records."""
