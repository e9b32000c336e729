"""Scribe's model: its configuration, what training adds to the Hugging Face model, and saving it."""

from __future__ import annotations

import json
import types
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationConfig

from tokenizer import END, END_OF_TEXT, save_tokenizer

MAX_POSITIONS = 8192


def scribe_config(tokenizer: Tokenizer, layers: int = 4, expert_width: int = 128) -> DeepseekV3Config:
    """The configuration: DeepSeek-V3 in miniature, with the full width of its latent key-value cache."""
    end_of_text, end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)
    return DeepseekV3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=expert_width,
        num_hidden_layers=layers,
        first_k_dense_replace=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=192,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        initializer_range=0.03,
        tie_word_embeddings=False,
        bos_token_id=end_of_text,
        eos_token_id=[end, end_of_text],
        pad_token_id=end_of_text,
    )


def _all_experts(self: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The routed experts as two dense products: every expert on every token, the unchosen ones weighted 0.

    For experts this narrow it is faster than sorting the tokens, and it is the same function.
    """
    experts, double, width = self.gate_up_proj.shape
    spread = torch.zeros(hidden.shape[0], experts, dtype=weights.dtype, device=hidden.device)
    spread = spread.scatter(1, chosen, weights)
    with torch.no_grad():
        self.load.add_((spread > 0).sum(0).to(self.load.dtype))
    both = functional.linear(hidden, self.gate_up_proj.reshape(experts * double, width))
    gate, up = both.view(-1, experts, double).chunk(2, dim=-1)
    inner = functional.silu(gate) * up * spread.to(both.dtype).unsqueeze(-1)
    return functional.linear(inner.flatten(1), self.down_proj.transpose(0, 1).reshape(width, -1)).to(hidden.dtype)


def prepare_for_training(model: DeepseekV3ForCausalLM, dropout: float) -> None:
    """Replace the experts' forward pass, count the experts' load, and drop out what the blocks add."""

    def drop(_module: nn.Module, _inputs: object, output: object) -> object:
        if isinstance(output, tuple):
            return (functional.dropout(output[0], dropout, model.training), *output[1:])
        return functional.dropout(output, dropout, model.training)

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            experts.load = torch.zeros(experts.num_experts, device=experts.down_proj.device)
            experts.forward = types.MethodType(_all_experts, experts)
        if dropout > 0:
            layer.self_attn.register_forward_hook(drop)
            layer.mlp.register_forward_hook(drop)


@torch.no_grad()
def balance_experts(model: DeepseekV3ForCausalLM, rate: float) -> list[float]:
    """Nudge the routers' selection bias toward even load; return each layer's largest share of the load.

    The bias only takes part in choosing experts, so no gradient reaches it; this is the auxiliary-loss-free
    balancing of DeepSeek-V3.
    """
    shares = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            load = layer.mlp.experts.load
            layer.mlp.gate.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)
            shares.append(load.max() / load.sum().clamp(min=1))
            load.zero_()
    return shares


def save_checkpoint(model: DeepseekV3ForCausalLM, tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write the bf16 weights, the configuration and the tokenizer in Hugging Face layout."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    copy = DeepseekV3ForCausalLM(model.config)
    state = {name: tensor.detach().float().cpu() for name, tensor in model.state_dict().items()}
    copy.load_state_dict(state)
    copy.to(torch.bfloat16)
    for module_name, module in copy.named_modules():
        if module_name.endswith("mlp.gate"):
            module.e_score_correction_bias.data = state[f"{module_name}.e_score_correction_bias"]
    config = model.config
    copy.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    copy.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    written.update(topk_method="noaux_tc", scoring_func="sigmoid")
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, MAX_POSITIONS)
