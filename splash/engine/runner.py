"""ModelRunner: carries out step plans on one rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from splash.core.errors import SwitchError
from splash.core.layout import Layout, check_layout, parse_layout
from splash.core.memory import ArenaGeometry
from splash.core.ownership import page_holders
from splash.core.request import TokenLogprob
from splash.core.step import NO_SLOT, Query, StepOutput, StepPlan
from splash.engine.config import DUMMY_FORMATS
from splash.engine.grammar import Grammars
from splash.engine.graphs import DecodeGraphs
from splash.engine.pending import LastTokens
from splash.engine.sampler import Sampled, Sampler
from splash.layouts.inputs import EagerInputs
from splash.layouts.rows import single_rows, step_rows
from splash.layouts.tables import PageTables
from splash.model.checkpoint import Checkpoint, torch_dtype
from splash.model.dummy import DummyCheckpoint
from splash.model.loader import Loader
from splash.model.rope import RotaryTable
from splash.model.transformer import Transformer
from splash.platform.base import Completion, Rank
from splash.platform.host_copies import upload
from splash.platform.span import Span
from splash.switch.orders import CopyAhead, PreparedCommit, SwitchOrder, SwitchOutcome, Vote
from splash.switch.prepared import Preparation
from splash.switch.queued import QueuedCopies
from splash.switch.transfer import Handoff, LayerCopies, Stream, copy_head_group

if TYPE_CHECKING:
    from splash.engine.tokenizer import Tokenizer

WARM_UP_ROWS = 1024  # most rows of a step before the first

Scores = tuple[int, int, tuple[TokenLogprob, ...]]  # of a prompt: see `StepOutput`


class Launched:
    """A step whose work has been queued on the device, or, where there are no queues, has been done.

    Args:
        plan: of the step.
        outcome: of the switch that it committed.
        waited: copies that the committing step waited for.
        sampled: its tokens; None on ranks that do not sample, or where nothing is.
        failures, scores: see `StepOutput`.
        has_output: whether this rank answers and the step has run.

    Attributes:
        forward: what takes `StepOutput.forward_s`; None on ranks that do not answer, and wait for nothing.
    """

    def __init__(
        self,
        plan: StepPlan,
        outcome: SwitchOutcome | None,
        sampled: Sampled | None = None,
        failures: Sequence[tuple[int, str]] = (),
        scores: Sequence[Scores] = (),
        has_output: bool = False,
        waited: Sequence[Completion] = (),
    ) -> None:
        self._plan, self._outcome, self._sampled, self._waited = plan, outcome, sampled, waited
        self._failures, self._scores, self._has_output = tuple(failures), tuple(scores), has_output
        self.forward: Span | None = None

    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        sampled, forward = self._sampled, self.forward
        return (sampled is None or sampled.is_done()) and (forward is None or forward.is_over())

    def result(self) -> tuple[StepOutput | None, SwitchOutcome | None]:
        """Wait for the step.

        Returns:
            on rank 0 the output, and the outcome of the switch where there is one; elsewhere the output is None. A
            switch that fails leaves every rank as it was before the step, and there is no output anywhere.
        """
        plan = self._plan
        tokens, logprobs = ([], []) if self._sampled is None else self._sampled.wait()
        forward_s = 0.0 if self.forward is None else self.forward.wait()
        outcome = self._outcome
        if outcome is not None and self._waited:
            waited_s = sum(copies.waited_s() for copies in self._waited)
            outcome = msgspec.structs.replace(outcome, exposed_s=outcome.exposed_s + waited_s)
        if not self._has_output:
            return None, outcome
        output = StepOutput(
            step=plan.step,
            epoch=plan.epoch,
            requests=tuple(query.request for query in plan.queries if query.sample),
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            failures=self._failures,
            scores=self._scores,
            forward_s=forward_s,
        )
        return output, outcome


class ModelRunner:
    """The model, the page tables and, on rank 0, the sampler of one rank.

    `weight_bytes` are the bytes of weights outside the arenas, `graph_bytes` those that recorded steps hold.
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
        load_format: str = "safetensors",
        graph_rows: int = 0,
    ) -> None:
        """Load the weights that this rank holds in `layout`, and record decode steps.

        Args:
            model: directory of the checkpoint.
            geometry: of the arenas.
            group: the rank's device.
            layout: to begin in.
            dtype: of weights, activations and cache.
            max_model_len: most positions of a request.
            eos_token_ids: tokens that end generation.
            load_format: as the engine's.
            graph_rows: decode steps of up to so many rows are recorded, where the platform can; 0 for none.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ConfigError: the layout cannot shard this model's heads over so many ranks.
        """
        spec, chosen = geometry.spec, parse_layout(layout)
        check_layout(chosen, spec.num_heads, group.size)
        if load_format in DUMMY_FORMATS:
            source = DummyCheckpoint(group.device, torch_dtype(dtype), load_format == "dummy_same_experts")
            weights = Loader(source, geometry, group, torch_dtype(dtype)).load(chosen)
        else:
            with Checkpoint(model) as checkpoint:
                weights = Loader(checkpoint, geometry, group, torch_dtype(dtype)).load(chosen)
        self.weight_bytes = weights.num_bytes()
        rotary = RotaryTable(spec.rope, spec.qk_rope_head_dim, max_model_len, group.device)
        self._transformer = Transformer(spec, weights, rotary, group)
        self._inputs = EagerInputs(group.device)
        self._group = group
        self._geometry = geometry
        self._failed_ahead: int | None = None  # the last switch that this rank failed to copy ahead of
        self._why_failed = ""
        self._coming = Preparation(0, group.size)  # the tables of a switch to come
        self._stream: Stream | None = None  # the layers that it leaves to the step that commits
        self._copying = QueuedCopies()
        self._tables = PageTables(group.size)
        self._last = LastTokens(group)
        grammars = Grammars(lambda: _tokenizer(model), spec.vocab_size, eos_token_ids)
        self._sampler = Sampler(eos_token_ids, group.kernels, grammars) if group.rank == 0 else None
        self._graphs: DecodeGraphs | None = None
        self._warm_up(chosen, max_model_len)
        before = self._held_bytes()
        if group.graphs is not None and graph_rows:
            self._graphs = DecodeGraphs(
                group.graphs, self._transformer, group, geometry, torch_dtype(dtype), graph_rows
            )
            self._graphs.capture()
        self.graph_bytes = self._held_bytes() - before

    def scores(self, plan: StepPlan) -> torch.Tensor | None:
        """The forward of `plan`: what `Transformer.forward` returns."""
        self._tables.release(plan.released)
        return self._forward(plan, self._tables, None)

    def _forward(self, plan: StepPlan, tables: PageTables, handoff: Handoff | Stream | None) -> torch.Tensor | None:
        """Run `plan`, once the state that a switch brings is there, or behind it layer by layer.

        Returns what `Transformer.forward` does.

        A recorded step is so much quicker than the same step by layers that it is worth waiting for all of them, unless
        chunks would have to be taken apart for it.
        """
        if not plan.queries:
            if handoff is not None:
                handoff.complete()
            return None
        layout = parse_layout(plan.layout)
        streams = handoff is not None and handoff.layerwise
        if self._graphs is not None and not streams and self._graphs.takes_chunks(plan):
            plan = msgspec.structs.replace(plan, queries=single_rows(plan.queries))
        rows = step_rows(plan, layout, self._group.rank, self._group.size, self._geometry.page_size, tables)
        graphs = self._graphs if self._graphs is not None and self._graphs.fits(rows) else None
        if handoff is not None and (graphs is not None or not streams):
            handoff.complete()
            handoff = None
        if graphs is not None:
            return graphs.forward(rows, self._last.fill)
        step = self._transformer.prepare(rows, self._inputs)
        self._last.fill(step.tokens, rows)
        return self._transformer.forward(step, None if handoff is None else handoff.arrive)

    def _warm_up(self, layout: Layout, max_model_len: int) -> None:
        """Run a few rows, and as many as attend in the expanded form, on pages that nobody has yet.

        So kernels are compiled, libraries loaded and workspaces made before a request waits for them.
        """
        geometry, size = self._geometry, self._group.size
        room = [geometry.page_slots(layout, rank) for rank in range(size)]
        longest = min(geometry.spec.expanded_rows, max_model_len, WARM_UP_ROWS)
        longest = min(longest, min(map(len, room)) * geometry.page_size)
        for num_rows in sorted({min(few, longest) for few in (1, 2, longest)} - {0}):
            numbers = np.arange(-(-num_rows // geometry.page_size))
            held = page_holders(numbers, np.zeros_like(numbers), layout, size)
            slots = np.where(held, np.stack([own[: len(numbers)] for own in room], axis=1), NO_SLOT)
            pages = tuple(map(tuple, slots.tolist()))
            query = Query(0, 0, (0,) * num_rows, 0, True, pages)
            self._forward(StepPlan(0, 0, layout.name, (query,)), PageTables(size), None)
        if self._sampler is not None:
            scores = torch.zeros(1, geometry.spec.vocab_size, device=self._group.device)
            self._group.kernels.nucleus_floor(scores, torch.full_like(scores[:, 0], 0.5, dtype=torch.float64))

    def _held_bytes(self) -> int:
        return 0 if self._group.memory is None else self._group.memory().held_bytes

    @property
    def graph_steps(self) -> int:
        """How many steps have been replayed."""
        return 0 if self._graphs is None else self._graphs.num_replayed

    @property
    def graph_seconds(self) -> float:
        """How long it took to record decode steps."""
        return 0.0 if self._graphs is None else self._graphs.seconds

    def run(
        self, plan: StepPlan, order: SwitchOrder | None = None, commit: PreparedCommit | None = None, copying: int = 0
    ) -> tuple[StepOutput | None, SwitchOutcome | None]:
        """`launch` a step and wait for it."""
        return self.launch(plan, order, commit, copying).result()

    def launch(
        self, plan: StepPlan, order: SwitchOrder | None = None, commit: PreparedCommit | None = None, copying: int = 0
    ) -> Launched:
        """Carry out a step. May be called again before it is over.

        Args:
            plan: of the step.
            order: the switch to commit with it by a manifest.
            commit: the prepared switch to commit with it.
            copying: number of the switch that goes on copying ahead; see `Run`.
        """
        started = time.perf_counter()
        waited = self._copying.settle(copying)
        outcome = None
        forward = self._group.span()
        if order is not None:
            try:
                scores, outcome = self._hand_off(plan, order)
            except SwitchError as error:
                return Launched(plan, SwitchOutcome(str(error), error.rank, error.recoverable))
        else:
            stream = None
            if commit is not None:
                self._tables = PageTables(self._group.size, self._coming.target(commit.digest))
                self._coming = Preparation(0, self._group.size)
                stream, self._stream = self._stream, None
                if stream is not None:
                    stream.begin()
                    waited += stream.reading
                outcome = SwitchOutcome(exposed_s=time.perf_counter() - started)
            self._tables.release(plan.released)
            scores = self._forward(plan, self._tables, stream)
            if commit is not None and not plan.queries:
                # No collective of a step tells that what peers have read may be written to from now on.
                self._group.exchange([0], settled=True)
        forward.end()
        launched, tokens = self._sample(plan, scores, outcome, () if outcome is None else waited)
        if self._sampler is not None:
            launched.forward = forward
        self._last.remember(plan, tokens)
        return launched

    def _hand_off(self, plan: StepPlan, order: SwitchOrder) -> tuple[torch.Tensor | None, SwitchOutcome]:
        """Run `plan` in the target state of a switch. What this rank keeps changes only once every layer is there."""
        manifest = order.manifest
        handoff = Handoff(manifest, self._geometry, self._group, order.layerwise)
        own_tables = {request: self._tables.slots(request) for request in manifest.requests if request >= 0}
        coming, self._coming = self._coming, Preparation(0, self._group.size)
        handoff.agree(own_tables, self._failed_ahead != order.switch, coming.matches(manifest))
        tables = PageTables(self._group.size, coming.tables(manifest))
        tables.release(plan.released)  # a request that moves may lose its pages to another in this very step
        scores = self._forward(plan, tables, handoff)
        self._tables = tables
        kv_bytes, weight_bytes, exposed_s = handoff.received()
        return scores, SwitchOutcome("", None, True, tuple(kv_bytes), tuple(weight_bytes), exposed_s)

    def copy_ahead(self, order: CopyAhead) -> Vote | None:
        """Copy what a coming switch will find in place, behind the steps that were launched.

        Where copies are queued they run beside the step that follows. Nothing here waits for the device.

        Returns:
            this rank's vote, where the order makes the target state whole. A failure before is told there, or at the
            commit by a manifest, which then fails.
        """

        rank = self._group.rank

        def work() -> None:
            if not order.copies_anything:
                return
            LayerCopies(order.rank_copies(rank), self._geometry, self._group).read_first(order.layers)
            for head_group, peer, layer in order.weights[rank]:
                copy_head_group(head_group, peer, layer, self._geometry, self._group)

        try:
            if self._coming.switch != order.switch:
                self._coming, self._stream = Preparation(order.switch, self._group.size), None
            self._coming.add(order.prepared, self._tables)
            if self._group.copies.is_queued and order.copies_anything:
                self._copying.add(order.switch, self._group.copies.begin(work))
            else:
                work()
            if order.rest is None:
                return None
            error = self._coming.complete(order.rest, self._tables)
            layers = range(order.layers, self._geometry.spec.num_layers)
            if layers and not error:
                copies = self._coming.copies(rank, self._geometry.page_size, order.streamed[rank])
                self._stream = Stream(LayerCopies(copies, self._geometry, self._group), layers, self._group)
        except Exception as failure:
            self._failed_ahead = order.switch
            self._why_failed = str(failure)
            if order.rest is None:
                return None
        if self._failed_ahead == order.switch:
            error = f"failed to copy ahead of the switch: {self._why_failed}"
        return Vote(rank, order.switch, self._coming.digest, error)

    def _sample(
        self,
        plan: StepPlan,
        scores: torch.Tensor | None,
        outcome: SwitchOutcome | None,
        waited: Sequence[Completion],
    ) -> tuple[Launched, torch.Tensor | None]:
        """The step, and the tokens that were chosen in it, as far as this rank knows them."""
        tokens = self._transformer.most_likely(scores) if plan.greedy and scores is not None else None
        logits = None if tokens is not None or scores is None else self._transformer.gather(scores)
        if self._sampler is None:
            return Launched(plan, outcome, waited=waited), tokens
        for request in plan.finished:
            self._sampler.remove(request)
        for new in plan.new:
            self._sampler.add(new)
        if tokens is not None:
            taken = self._sampler.take(tokens, [query.request for query in plan.queries if query.sample])
            return Launched(plan, outcome, taken, has_output=True, waited=waited), tokens
        if logits is None:
            return Launched(plan, outcome, has_output=True, waited=waited), None
        sampling = [(query.request, query.start + len(query.tokens)) for query in plan.queries if query.sample]
        found: list[Scores] = []
        if any(query.score for query in plan.queries):
            logits, found = self._score(plan, logits)
        if not sampling:
            return Launched(plan, outcome, scores=found, has_output=True, waited=waited), None
        sampled = self._sampler.sample(logits, sampling)
        return Launched(plan, outcome, sampled, self._sampler.failures, found, True, waited), sampled.tokens_n

    def _score(self, plan: StepPlan, logits: torch.Tensor) -> tuple[torch.Tensor, list[Scores]]:
        """Score what is to be scored; the logits of the rows to sample after, and the scores."""
        assert self._sampler is not None
        scores = []
        last_rows = []
        row = 0
        for query in plan.queries:
            count = len(query.tokens) if query.score else int(query.sample)
            if query.score:
                found = self._sampler.score(logits[row : row + count], query.request, query.start + 1)
                scores.append((query.request, query.start + 1, found))
            row += count
            if query.sample:
                last_rows.append(row - 1)
        return logits[upload(torch.tensor(last_rows, dtype=torch.int64), logits.device)], scores

    def prepare(self) -> None:
        """What can be done for the next step before it is known."""
        if self._sampler is not None:
            self._sampler.prepare()


def _tokenizer(model: str | Path) -> Tokenizer:
    from splash.engine.tokenizer import Tokenizer  # few ranks ever need one

    return Tokenizer.load(model)
