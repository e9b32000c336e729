"""DecodeTimes: what the steps of a decode run take, one after the other."""

from __future__ import annotations

from splash.core.layout import Layout
from splash.scheduler.attention_costs import DecodeForm
from splash.scheduler.cost_model import CostModel
from splash.scheduler.load import StepLoad


class DecodeTimes:
    """Predicts steps in which the same requests decode, each one key further on in every step.

    They are what `CostModel.step` predicts, to the last digit: of its stages only attention, what hides behind it and
    the launches that show differ from one step to the next, and nothing else is predicted again. Where attention takes
    more to predict than numbers of rows and keys, as with pages that are striped over ranks, everything is.

    Args:
        model: predicts the first step.
        layout: of the steps.
        load: of the first step, which has singles only.
    """

    def __init__(self, model: CostModel, layout: Layout, load: StepLoad) -> None:
        self._model = model
        self._layout = layout
        self._load = load  # of the last step, where all of it is needed
        self._is_first = True
        forms = model.attention.decode_forms(layout, load)
        self._forms = None if forms is None else [_Form(model, form, layout, load) for form in forms]
        self._is_graph = model.runs_as_graph(layout, load)

    def next(self) -> float:
        """Seconds of the next step, the first one at first."""
        if self._forms is None:
            self._load = self._load if self._is_first else self._load.next_decode()
            self._is_first = False
            return self._model.step(self._layout, self._load).seconds
        slowest, attention = self._forms[0], self._forms[0].attend()
        if len(self._forms) > 1:
            most = slowest.layer_seconds(attention)
            for form in self._forms[1:]:
                own = form.attend()
                if form.layer_seconds(own) > most:
                    most, slowest, attention = form.layer_seconds(own), form, own
        return self._model.attend(slowest.stages, attention, slowest.layer.ops, self._is_graph)


class _Form:
    """Steps whose slowest rank is one of some that differ only in the keys that they attend to."""

    def __init__(self, model: CostModel, form: DecodeForm, layout: Layout, load: StepLoad) -> None:
        self.layer = form.layer
        self.stages = model.step_with(form.layer, layout, load).stages
        self._attend = model.stages.attend_singles
        self._heads = form.heads
        self._keys = form.keys

    def attend(self) -> float:
        """Attention of one layer in the next step."""
        keys, heads, attend = self._keys, self._heads, self._attend
        self._keys = [(count + rows, rows) for count, rows in keys]
        return max([attend(count, count, rows, heads) for count, rows in keys])

    def layer_seconds(self, attention: float) -> float:
        """What a layer takes with that."""
        layer = self.layer
        return layer.projections + attention + layer.movement + layer.exchange
