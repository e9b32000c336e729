"""The CPU platform: torch, shared memory between ranks, and the numeric oracle for every other platform."""
