"""Reading a Hugging Face `config.json` into a `ModelSpec`. Files and JSON only; torch is never imported.

Any multi-head-latent-attention configuration can be read, which is all that planning needs. Whether SPLASH can also
*serve* it is a second question that `check_servable` answers. Three architectures are the same model to us: they share
attention, router and experts with DeepSeek-V3, and differ in which layers are dense and in their defaults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from splash.core.errors import CheckpointError
from splash.core.spec import IndexerSpec, ModelSpec, MoeSpec, RopeSpec

BUILTIN = "builtin:"
DEFAULT_MODEL = "builtin:scribe"  # ships with SPLASH

SERVABLE = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "YoutuForCausalLM")

# What a configuration that does not say so means by default, where architectures differ.
_TIED_BY_DEFAULT = ("MiniCPM3ForCausalLM", "YoutuForCausalLM")
_FIRST_DENSE_BY_DEFAULT = {"Glm4MoeLiteForCausalLM": 1}
_HALF_SPLIT_ROPE = ("MiniCPM3ForCausalLM",)  # has no interleaved form, whatever its configuration says


@dataclass(frozen=True)
class ModelConfig:
    """What a checkpoint's configuration says.

    Attributes:
        spec: the dimensions.
        eos_token_ids: tokens that end generation.
        bos_token_id: token that starts a text, None where the model has none.
        dtype: dtype the weights were saved in, such as "bfloat16"; None where the configuration does not say.
        obstacles: what in the configuration SPLASH cannot serve, one phrase each; empty where nothing stands in the
            way. The architecture is not among them.
    """

    spec: ModelSpec
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str | None
    obstacles: tuple[str, ...]


def resolve_model_path(path: str | Path) -> Path:
    """The directory that `path` means: itself, or inside the package where it is "builtin:NAME"."""
    if isinstance(path, str) and path.startswith(BUILTIN):
        return Path(str(resources.files("splash"))) / "data" / path.removeprefix(BUILTIN)
    return Path(path).expanduser()


def load_model_config(path: str | Path) -> ModelConfig:
    """Read the configuration of a checkpoint directory.

    Raises:
        CheckpointError: the directory or `config.json` is missing, malformed or describes no model we can represent.
    """
    return parse_model_config(read_model_config(path), str(resolve_model_path(path) / "config.json"))


def read_model_config(path: str | Path) -> dict[str, Any]:
    """The contents of `config.json`, with the tokens of `generation_config.json` where there is one.

    Raises:
        CheckpointError: the directory or `config.json` is missing or malformed.
    """
    directory = resolve_model_path(path)
    if not directory.is_dir():
        raise CheckpointError(f"{path}: no such directory{f' ({directory})' if str(directory) != str(path) else ''}")
    mapping = _read_json(directory / "config.json")
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    # What a model should stop at is maintained in generation_config.json; config.json may name fewer tokens.
    tokens = {key: generation[key] for key in ("eos_token_id", "bos_token_id") if generation.get(key) is not None}
    return {**mapping, **tokens}


def check_servable(config: ModelConfig) -> None:
    """Refuse a model that SPLASH can plan for but not run.

    Raises:
        CheckpointError: naming the architecture and those supported, or everything else that stands in the way.
    """
    if config.spec.architecture not in SERVABLE:
        raise CheckpointError(
            f"architecture {config.spec.architecture!r} cannot be served; supported are {', '.join(SERVABLE)}"
        )
    if config.obstacles:
        raise CheckpointError(
            f"{config.spec.architecture} cannot be served as configured: {'; '.join(config.obstacles)}"
        )


def parse_model_config(mapping: Mapping[str, Any], source: str) -> ModelConfig:
    """Read the contents of a `config.json`. `source` names it in errors.

    Raises:
        CheckpointError: keys are missing (all are named), of the wrong type or out of range.
    """
    fields = _Fields(mapping, source)
    architectures = fields.get("architectures", list, [])
    if len(architectures) != 1 or not isinstance(architectures[0], str):
        raise CheckpointError(f"{source}: architectures must list one architecture, not {architectures!r}")
    architecture = architectures[0]

    num_layers = fields.dim("num_hidden_layers")
    max_positions = fields.dim("max_position_embeddings")
    moe = _moe(fields)
    spec = ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=fields.dim("hidden_size"),
        vocab_size=fields.dim("vocab_size"),
        num_heads=fields.dim("num_attention_heads"),
        q_lora_rank=fields.optional_dim("q_lora_rank"),
        kv_lora_rank=fields.dim("kv_lora_rank"),
        qk_nope_head_dim=fields.dim("qk_nope_head_dim"),
        qk_rope_head_dim=fields.dim("qk_rope_head_dim"),
        v_head_dim=fields.dim("v_head_dim"),
        intermediate_size=fields.dim("intermediate_size"),
        first_dense_layers=num_layers if moe is None else _first_dense_layers(fields, architecture, num_layers),
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.positive("rms_norm_eps"),
        rope=_rope(fields, architecture, max_positions),
        moe=moe,
        indexer=_indexer(fields),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, architecture in _TIED_BY_DEFAULT),
        attention_bias=fields.get("attention_bias", bool, False),
    )
    config = ModelConfig(
        spec=spec,
        eos_token_ids=_token_ids(mapping.get("eos_token_id"), source),
        bos_token_id=fields.get("bos_token_id", int, None),
        dtype=fields.get("dtype", str, None) or fields.get("torch_dtype", str, None),
        obstacles=_obstacles(mapping, spec),
    )
    fields.check()
    if spec.qk_rope_head_dim % 2:
        fields.fail("qk_rope_head_dim", "must be even", spec.qk_rope_head_dim)
    return config


class _Fields:
    """A configuration being read. Missing keys are collected, so that one error names them all."""

    def __init__(self, mapping: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.mapping, self.source, self.prefix = mapping, source, prefix
        self.missing: list[str] = []

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of `key`, or `default` where it is absent or null."""
        value = self.mapping.get(key)
        if value is None:
            return default
        # JSON's true and false are ints to Python, and its whole numbers are good floats.
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            self.fail(key, f"must be {_KINDS[kind]}", value)
        return value

    def dim(self, key: str) -> int:
        """A required whole number of at least 1."""
        value: int | None = self.get(key, int, None)
        if value is None:
            self.missing.append(self.prefix + key)
            return 1
        if value < 1:
            self.fail(key, "must be at least 1", value)
        return value

    def optional_dim(self, key: str) -> int | None:
        """A whole number of at least 1, or null. The key itself is required: absent and null are different models."""
        return None if key in self.mapping and self.mapping[key] is None else self.dim(key)

    def positive(self, key: str) -> float:
        """A required finite number above 0."""
        value: float | None = self.get(key, float, None)
        if value is None:
            self.missing.append(self.prefix + key)
            return 1.0
        if not (value > 0 and math.isfinite(value)):
            self.fail(key, "must be above 0", value)
        return float(value)

    def fail(self, key: str, accepted: str, value: object) -> None:
        raise CheckpointError(f"{self.source}: {self.prefix}{key} {accepted}, not {value!r}")

    def check(self) -> None:
        """Raise for the keys that were missing so far."""
        if self.missing:
            raise CheckpointError(f"{self.source}: missing {', '.join(self.missing)}")


_KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


def _moe(fields: _Fields) -> MoeSpec | None:
    """The mixture-of-experts parameters, or None for a dense model."""
    num_experts = fields.get("n_routed_experts", int, 0)
    if num_experts == 0:
        return None
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=fields.dim("num_experts_per_tok"),
        intermediate_size=fields.dim("moe_intermediate_size"),
        num_shared_experts=fields.get("n_shared_experts", int, 0),
        num_groups=fields.dim("n_group"),
        top_k_groups=fields.dim("topk_group"),
        norm_topk_prob=fields.get("norm_topk_prob", bool, True),
        routed_scaling_factor=fields.positive("routed_scaling_factor"),
    )
    for key, value in (("n_routed_experts", num_experts), ("n_shared_experts", moe.num_shared_experts)):
        if value < 0:
            fields.fail(key, "must be at least 0", value)
    if num_experts % moe.num_groups:
        fields.fail("n_group", f"must divide the {num_experts} experts", moe.num_groups)
    if moe.top_k_groups > moe.num_groups:
        fields.fail("topk_group", f"must be at most n_group ({moe.num_groups})", moe.top_k_groups)
    reachable = num_experts // moe.num_groups * moe.top_k_groups
    if moe.top_k > reachable:
        fields.fail("num_experts_per_tok", f"must be at most the {reachable} experts of topk_group groups", moe.top_k)
    return moe


def _first_dense_layers(fields: _Fields, architecture: str, num_layers: int) -> int:
    """How many layers come before the first that routes to experts."""
    kinds = fields.get("mlp_layer_types", list, None)
    if kinds is None:
        first = fields.get("first_k_dense_replace", int, _FIRST_DENSE_BY_DEFAULT.get(architecture))
        if first is None:
            fields.missing.append("first_k_dense_replace")
            return 0
        if first < 0:
            fields.fail("first_k_dense_replace", "must be at least 0", first)
        return min(int(first), num_layers)
    first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * first + ["sparse"] * (num_layers - first):
        fields.fail(
            "mlp_layer_types", f"must be {num_layers} layers, 'dense' ones first and 'sparse' ones after", kinds
        )
    return first


def _rope(fields: _Fields, architecture: str, max_positions: int) -> RopeSpec:
    """Rotary parameters from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`."""
    scaling = fields.get("rope_scaling", dict, None) or fields.get("rope_parameters", dict, {})
    rope = _Fields(scaling, fields.source, "rope_parameters.")
    theta = rope.get("rope_theta", float, None) or fields.get("rope_theta", float, None)
    if theta is None:
        fields.missing.append("rope_theta")
        theta = 1.0
    elif not theta > 0:
        rope.fail("rope_theta", "must be above 0", theta)
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    if kind not in ("default", "yarn"):
        rope.fail("rope_type", "must be 'default' or 'yarn'", kind)
    partial = rope.get("partial_rotary_factor", float, None) or fields.get("partial_rotary_factor", float, 1.0)
    if partial != 1:
        rope.fail("partial_rotary_factor", "must be 1 (the rotary dims are a part of their own)", partial)
    interleave = fields.get("rope_interleave", bool, True) and architecture not in _HALF_SPLIT_ROPE
    if kind == "default":
        return RopeSpec(theta=float(theta), interleave=interleave)

    factor = rope.positive("factor")
    attention_factor = rope.get("attention_factor", float, None)
    original = fields.get("original_max_position_embeddings", int, None)
    spec = RopeSpec(
        theta=float(theta),
        type="yarn",
        factor=factor,
        original_max_position_embeddings=original or rope.get("original_max_position_embeddings", int, max_positions),
        beta_fast=float(rope.get("beta_fast", float, 0) or 32),
        beta_slow=float(rope.get("beta_slow", float, 0) or 1),
        mscale=float(rope.get("mscale", float, 0)),
        mscale_all_dim=float(rope.get("mscale_all_dim", float, 0)),
        attention_factor=None if attention_factor is None else float(attention_factor),
        interleave=interleave,
    )
    fields.missing += rope.missing
    if not rope.missing and factor < 1:
        rope.fail("factor", "must be at least 1", factor)
    if spec.original_max_position_embeddings < 1:
        rope.fail("original_max_position_embeddings", "must be at least 1", spec.original_max_position_embeddings)
    return spec


def _indexer(fields: _Fields) -> IndexerSpec | None:
    """The sparse-attention indexer, or None where attention is dense."""
    if fields.mapping.get("index_topk") is None:
        return None
    return IndexerSpec(fields.dim("index_n_heads"), fields.dim("index_head_dim"), fields.dim("index_topk"))


def _token_ids(value: object, source: str) -> tuple[int, ...]:
    """`eos_token_id`: a token, a list of tokens or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CheckpointError(f"{source}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _obstacles(mapping: Mapping[str, Any], spec: ModelSpec) -> tuple[str, ...]:
    """What in a configuration of a servable architecture SPLASH does not implement."""
    rope = mapping.get("rope_scaling") or mapping.get("rope_parameters") or {}
    heads = spec.num_heads
    quantization = mapping.get("quantization_config")
    checks = (
        (quantization is None, f"quantized weights ({_method(quantization)}) are not supported yet"),
        (mapping.get("hidden_act", "silu") == "silu", f"hidden_act must be 'silu', not {mapping.get('hidden_act')!r}"),
        (not spec.attention_bias, "attention_bias must be false"),
        (not mapping.get("mlp_bias"), "mlp_bias must be false"),
        (spec.indexer is None, "sparse attention (index_topk) is not supported yet"),
        (mapping.get("moe_layer_freq", 1) in (1, None), "moe_layer_freq must be 1"),
        (mapping.get("scoring_func", "sigmoid") == "sigmoid", "scoring_func must be 'sigmoid'"),
        (mapping.get("topk_method", "noaux_tc") == "noaux_tc", "topk_method must be 'noaux_tc'"),
        (mapping.get("num_key_value_heads") in (heads, None), f"num_key_value_heads must equal the {heads} heads"),
        (rope.get("truncate", True) is not False, "rope_parameters.truncate must be true"),
    )
    return tuple(obstacle for ok, obstacle in checks if not ok)


def _method(quantization: object) -> object:
    return quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; a checkpoint directory needs one") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: must be a JSON object, not {type(contents).__name__}")
    return contents
