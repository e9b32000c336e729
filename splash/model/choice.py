"""Which model: a file of conf/model. It has a checkpoint's directory or the contents of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splash.core.errors import ConfigError
from splash.core.spec import ModelSpec
from splash.model.config import parse_model_config, read_model_config


@dataclass(frozen=True)
class ModelChoice:
    """A model by name.

    Attributes:
        name: what it is called.
        path: a checkpoint's directory, or "builtin:NAME"; None for a model without weights.
        config: the contents of a config.json, where there is no path.
        num_layers: so many of the first layers instead of all.
        num_experts: so many experts a layer instead of all.
    """

    name: str
    path: str | None = None
    config: Mapping[str, Any] | None = None
    num_layers: int | None = None
    num_experts: int | None = None

    @property
    def is_reduced(self) -> bool:
        """Whether less than the whole model is asked for."""
        return self.num_layers is not None or self.num_experts is not None

    def contents(self) -> dict[str, Any]:
        """The contents of its config.json, reduced as asked. A path, where one is given, comes first.

        Raises:
            CheckpointError: the checkpoint's configuration cannot be read.
            ConfigError: there is neither a path nor a config, or the model has fewer layers or experts than asked for.
        """
        if self.path is not None:
            contents = read_model_config(self.path)
        elif self.config is not None:
            contents = dict(self.config)
        else:
            raise ConfigError("model.path", f"model {self.name!r} has neither a path nor a config; give one")
        for field, key, wanted in (
            ("num_layers", "num_hidden_layers", self.num_layers),
            ("num_experts", "n_routed_experts", self.num_experts),
        ):
            if wanted is not None:
                most = contents.get(key) or 0
                if not 1 <= wanted <= most:
                    raise ConfigError(f"model.{field}", f"must be between 1 and the model's {most}, not {wanted}")
                contents[key] = wanted
        if self.num_layers is not None and "mlp_layer_types" in contents:
            contents["mlp_layer_types"] = contents["mlp_layer_types"][: self.num_layers]
        return contents

    def spec(self) -> ModelSpec:
        """Its dimensions. Raises as `contents`."""
        return parse_model_config(self.contents(), f"model={self.name}").spec
