"""Attention in every layout: project -> exchange -> attend -> exchange back -> output.

The exchanges follow from the two placements of a layout, not from its name. Shape suffixes: n rows of this rank, N rows
of the step, h heads that this rank projects, H all heads, K = C + R absorbed query-key dim, C kv-lora rank, R rotary
dim, V value dim, D hidden size, S slots, P page size, T ranks.
"""
