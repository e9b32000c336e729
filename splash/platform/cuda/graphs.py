"""CUDA graphs: a step recorded once and queued again with one call."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from splash.platform.base import CapturableAttention, Graph, Graphs

_T = TypeVar("_T")


class CudaGraph(Graph):
    """A recorded step."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphs(Graphs):
    """Graphs of one rank. They share a pool of memory, so the largest is to be captured first."""

    def __init__(self, attention: CapturableAttention) -> None:
        self.attention = attention
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: list[CudaGraph] = []

    def capture(self, work: Callable[[], _T]) -> tuple[Graph, _T]:
        made = CudaGraph()
        stream = torch.cuda.current_stream()
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(made.graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = work()
        self._graphs.append(made)
        return made, result

    def clear(self) -> None:
        # A process that leaves NCCL while a graph holds its kernels does not exit.
        for made in self._graphs:
            made.graph.reset()
        self._graphs.clear()
        gc.collect()
