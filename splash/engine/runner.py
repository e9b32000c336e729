"""ModelRunner: carries out step plans on one rank."""

from __future__ import annotations

from pathlib import Path

import torch

from splash.core.layout import check_layout, parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.step import StepOutput, StepPlan
from splash.engine.sampler import Sampler
from splash.layouts.rows import step_rows
from splash.layouts.tables import PageTables
from splash.model.checkpoint import Checkpoint, torch_dtype
from splash.model.loader import Loader
from splash.model.rope import RotaryTable
from splash.model.transformer import Transformer
from splash.platform.base import Rank


class ModelRunner:
    """The model, the page tables and, on rank 0, the sampler of one rank.

    `weight_bytes` are the bytes of weights outside the arenas.
    """

    def __init__(
        self,
        model: str | Path,
        geometry: ArenaGeometry,
        group: Rank,
        layout: str,
        dtype: str,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """Load the weights that this rank holds in `layout`.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ConfigError: the layout cannot shard this model's heads over so many ranks.
        """
        spec, chosen = geometry.spec, parse_layout(layout)
        check_layout(chosen, spec.num_heads, group.size)
        with Checkpoint(model) as checkpoint:
            weights = Loader(checkpoint, geometry, group, torch_dtype(dtype)).load(chosen)
        self.weight_bytes = weights.num_bytes()
        rotary = RotaryTable(spec.rope, spec.qk_rope_head_dim, max_model_len, group.device)
        self._transformer = Transformer(spec, weights, rotary, group)
        self._group = group
        self._page_size = geometry.page_size
        self._tables = PageTables(group.size)
        self._sampler = Sampler(eos_token_ids) if group.rank == 0 else None

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Run the forward of `plan`: logits float32 [samples, vocabulary] on rank 0, None elsewhere or with no samples."""
        self._tables.release(plan.released)
        if not plan.queries:
            return None
        layout = parse_layout(plan.layout)
        rows = step_rows(plan, layout, self._group.rank, self._group.size, self._page_size, self._tables)
        return self._transformer.forward(rows)

    def run(self, plan: StepPlan) -> StepOutput | None:
        """Carry out `plan`; rank 0 samples and returns the output, the others return None."""
        if self._sampler is not None:
            for request in plan.finished:
                self._sampler.remove(request)
            for new in plan.new:
                self._sampler.add(new)
        logits = self.logits(plan)
        if self._sampler is None:
            return None
        sampling = [(query.request, query.start + len(query.tokens)) for query in plan.queries if query.sample]
        tokens, logprobs = self._sampler.sample(logits, sampling) if logits is not None else ([], [])
        return StepOutput(
            step=plan.step,
            epoch=plan.epoch,
            requests=tuple(request for request, _ in sampling),
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
        )
