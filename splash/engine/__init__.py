"""The engine: scheduler, a group of ranks, and the text that comes out."""
