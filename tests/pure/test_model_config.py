"""Reading config.json: what is accepted, what is refused and how, and that the numbers are Hugging Face's."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splash.core.errors import CheckpointError
from splash.core.spec import RopeSpec
from splash.model.config import SERVABLE, check_servable, load_model_config, parse_model_config
from splash.settings import compose

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def shipped(name: str) -> dict[str, Any]:
    config: dict[str, Any] = compose("plan", [f"model={name}"])["model"]["config"]
    return config


@pytest.fixture(scope="module")
def v3() -> dict[str, Any]:
    return shipped("deepseek_v3")


def write(directory: Path, **files: object) -> Path:
    for name, contents in files.items():
        (directory / f"{name}.json").write_text(contents if isinstance(contents, str) else json.dumps(contents))
    return directory


def test_deepseek_v3_as_released(v3: dict[str, Any], tmp_path: Path) -> None:
    """The older form: `rope_theta` beside `rope_scaling`, and keys that mean nothing to inference."""
    released = {key: value for key, value in v3.items() if key != "rope_parameters"} | {
        "rope_theta": 10000,
        "rope_scaling": {
            key if key != "rope_type" else "type": value for key, value in YARN.items() if key != "rope_theta"
        },
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    config = load_model_config(write(tmp_path, config=released))
    assert config.spec == parse_model_config(v3, "v3").spec
    assert config.spec.rope == RopeSpec(10000.0, "yarn", 40.0, 4096, 32.0, 1.0, 1.0, 1.0, None, interleave=True)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (0, (1,), "bfloat16")
    assert config.spec.softmax_scale == pytest.approx(0.135234, abs=1e-6) and config.spec.rope.cos_sin_factor == 1.0
    check_servable(config)
    quantized = parse_model_config(released | {"quantization_config": {"quant_method": "fp8"}}, "v3")
    with pytest.raises(CheckpointError, match=r"quantized weights \(fp8\) are not supported yet"):
        check_servable(quantized)


def test_generation_config_says_where_to_stop(v3: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, config=v3 | {"eos_token_id": 1}, generation_config={"eos_token_id": [1, 7], "temperature": 0.6})
    assert load_model_config(tmp_path).eos_token_ids == (1, 7)
    write(tmp_path, generation_config={"temperature": 0.6})
    assert load_model_config(tmp_path).eos_token_ids == (1,)


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu", "glm_4_7_flash"])
def test_models_that_share_deepseeks_architecture_are_servable(name: str) -> None:
    config = parse_model_config(shipped(name), name)
    check_servable(config)
    dense = config.spec.first_dense_layers
    assert dense == {"deepseek_v3": 3, "youtu": 32, "glm_4_7_flash": 1}[name]
    assert config.spec.is_moe_layer(dense) == (name != "youtu") and not config.spec.is_moe_layer(dense - 1)
    assert config.spec.tie_word_embeddings == (name == "youtu")


@pytest.mark.parametrize("name", ["deepseek_v3_2", "glm_5", "minicpm3"])
def test_other_models_can_be_planned_for_but_not_served(name: str) -> None:
    config = parse_model_config(shipped(name), name)
    with pytest.raises(CheckpointError) as caught:
        check_servable(config)
    assert config.spec.architecture in str(caught.value)
    assert all(architecture in str(caught.value) for architecture in SERVABLE)


def test_no_q_lora_is_a_model_of_its_own(v3: dict[str, Any]) -> None:
    config = parse_model_config(v3 | {"q_lora_rank": None}, "v3")
    check_servable(config)
    assert config.spec.q_lora_rank is None and config.spec.query_input_dim == 7168
    with pytest.raises(CheckpointError, match="missing q_lora_rank"):
        parse_model_config({key: value for key, value in v3.items() if key != "q_lora_rank"}, "v3")


def test_every_missing_key_is_named_at_once(v3: dict[str, Any]) -> None:
    gone = {"kv_lora_rank", "v_head_dim", "rms_norm_eps", "num_experts_per_tok", "first_k_dense_replace"}
    broken = {key: value for key, value in v3.items() if key not in gone}
    broken["rope_parameters"] = {"rope_type": "yarn"}
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(broken, "x/config.json")
    assert str(caught.value).startswith("x/config.json: missing ")
    assert all(key in str(caught.value) for key in gone | {"rope_theta", "rope_parameters.factor"})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architectures": None}, "architectures must list one architecture"),
        ({"architectures": ["A", "B"]}, "architectures must list one architecture"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architectures must be a list"),
        ({"hidden_size": "7168"}, "hidden_size must be a whole number, not '7168'"),
        ({"hidden_size": 7168.0}, "hidden_size must be a whole number, not 7168.0"),
        ({"hidden_size": True}, "hidden_size must be a whole number, not True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, not 0"),
        ({"kv_lora_rank": -512}, "kv_lora_rank must be at least 1, not -512"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, not 0"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, not 63"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0, not 0"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a number, not 'tiny'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        ({"n_group": 7}, "n_group must divide the 256 experts, not 7"),
        ({"topk_group": 9}, "topk_group must be at most n_group (8), not 9"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be at most the 128 experts"),
        ({"n_shared_experts": -1}, "n_shared_experts must be at least 0, not -1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be at least 0, not -1"),
        ({"mlp_layer_types": ["sparse"] * 60 + ["dense"]}, "mlp_layer_types must be 61 layers"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be a token id or a list of them"),
        ({"bos_token_id": "<s>"}, "bos_token_id must be a whole number"),
        ({"rope_parameters": YARN | {"rope_type": "llama3"}}, "rope_type must be 'default' or 'yarn', not 'llama3'"),
        ({"rope_parameters": YARN | {"factor": 0.5}}, "rope_parameters.factor must be at least 1, not 0.5"),
        ({"rope_parameters": YARN | {"factor": "40"}}, "rope_parameters.factor must be a number, not '40'"),
        ({"rope_parameters": YARN | {"rope_theta": -1}}, "rope_parameters.rope_theta must be above 0, not -1"),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1"),
        ({"rope_parameters": [1]}, "rope_parameters must be a mapping"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(v3: dict[str, Any], change: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_model_config(v3 | change, "here")
    assert str(caught.value).startswith("here: ") and expected in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', not 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be false"),
        ({"mlp_bias": True}, "mlp_bias must be false"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must equal the 128 heads"),
        ({"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}, "sparse attention"),
        ({"rope_parameters": YARN | {"truncate": False}}, "truncate must be true"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_what_cannot_be_served_can_still_be_read(v3: dict[str, Any], change: dict[str, Any], expected: str) -> None:
    config = parse_model_config(v3 | change, "here")
    with pytest.raises(CheckpointError, match="cannot be served as configured") as caught:
        check_servable(config)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (None, "no such file"),
        ("{", "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("[1]", "must be a JSON object, not list"),
        ("{}", "architectures"),
    ],
)
def test_a_damaged_directory_says_what_is_wrong(tmp_path: Path, contents: str | None, expected: str) -> None:
    if contents is not None:
        (tmp_path / "config.json").write_bytes(contents.encode("latin-1"))
    with pytest.raises(CheckpointError, match=expected) as caught:
        load_model_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_missing_directory_and_a_file_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", write(tmp_path, config="{}") / "config.json"):
        with pytest.raises(CheckpointError, match="no such directory"):
            load_model_config(path)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "deepseek": YARN,
    "no mscale": {key: value for key, value in YARN.items() if not key.startswith("mscale")},
    "mscale alone": {key: value for key, value in YARN.items() if key != "mscale_all_dim"} | {"mscale": 0.7},
    "mscale_all_dim alone": {key: value for key, value in YARN.items() if key != "mscale"} | {"mscale_all_dim": 0.7},
    "unequal mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "attention factor": YARN | {"attention_factor": 1.25},
    "not stretched": YARN | {"factor": 1.0},
    "no betas": {key: value for key, value in YARN.items() if not key.startswith("beta")},
    "original from max": {key: value for key, value in YARN.items() if not key.startswith("original")},
}


@pytest.mark.parametrize("name", ROPES)
def test_scales_are_those_of_transformers(v3: dict[str, Any], name: str) -> None:
    """The softmax scale, the factor on cos and sin, and the parameters of the frequencies."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    small = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    contents = v3 | small | {"q_lora_rank": None, "kv_lora_rank": 8, "rope_parameters": dict(ROPES[name])}
    reference = transformers.DeepseekV3Config(**json.loads(json.dumps(contents)))
    spec = parse_model_config(contents, name).spec
    assert spec.softmax_scale == pytest.approx(DeepseekV3Attention(reference, 0).scaling, rel=1e-12)
    if spec.rope.type == "default":
        assert spec.rope.cos_sin_factor == 1.0
        return
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](reference)
    assert spec.rope.cos_sin_factor == pytest.approx(factor, rel=1e-12)
    ours = yarn_frequencies(spec.rope, spec.qk_rope_head_dim)
    assert frequencies.tolist() == pytest.approx(ours, rel=1e-5)


def yarn_frequencies(rope: RopeSpec, dim: int) -> list[float]:
    """YaRN's inverse frequencies (Peng et al., 2023, section 3.2) from a RopeSpec alone."""

    def pair_turning(turns: float) -> float:
        context = rope.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_turning(rope.beta_fast)), 0)
    high = min(math.ceil(pair_turning(rope.beta_slow)), dim - 1)
    frequencies = []
    for pair in range(dim // 2):
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        plain = rope.theta ** (-2 * pair / dim)
        frequencies.append(plain / rope.factor * ramp + plain * (1 - ramp))
    return frequencies


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4MoeLite", "Youtu"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_can_be_read_back(tmp_path: Path, family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    dims = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}
    reference = getattr(transformers, f"{family}Config")(
        **dims,
        tie_word_embeddings=tied,
        architectures=[f"{family}ForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        eos_token_id=[2, 3],
        dtype="bfloat16",
    )
    reference.save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    check_servable(config)
    spec = config.spec
    assert spec.tie_word_embeddings is tied and config.eos_token_ids == (2, 3) and config.dtype == "bfloat16"
    assert spec.rope == RopeSpec(theta=5e5) and (spec.num_layers, spec.hidden_size, spec.num_heads) == (3, 64, 4)
    for key in ("vocab_size", "kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "intermediate_size"):
        assert getattr(spec, key) == getattr(reference, key)
    if spec.moe is not None:
        assert spec.moe.num_experts == reference.n_routed_experts and spec.moe.top_k == reference.num_experts_per_tok
        assert spec.moe.routed_scaling_factor == reference.routed_scaling_factor


def test_specs_are_values(v3: dict[str, Any]) -> None:
    first, second = parse_model_config(v3, "a").spec, parse_model_config(v3, "b").spec
    assert first == second and hash(first) == hash(second) and replace(first, num_layers=1) != second
