"""Small random checkpoints in the DeepSeek-V3 format, written by transformers, which is also the oracle.

Weights are drawn so that errors show: every matrix keeps the variance of its input, so that logits are spread and
greedy choices do not tie; norms differ from one and the router's correction bias from zero, so that leaving either
out changes the output.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

BOS, EOS, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (BOS, EOS, USER, ASSISTANT, END)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = (
    "The quick brown fox jumps over the lazy dog while the five boxing wizards watch. "
    "A page is sixty-four consecutive positions of one sequence; a rank is one process with one device. "
    "How many ranks hold this page? Every rank that the layout names, and no other.\n"
)

_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 320,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

SHAPES: dict[str, dict[str, Any]] = {
    "base": _BASE,
    "no_q_lora": {**_BASE, "q_lora_rank": None, "rope_parameters": _PLAIN_ROPE, "n_group": 4, "topk_group": 2},
    "odd": {
        **_BASE,
        "vocab_size": 515,
        "hidden_size": 132,
        "intermediate_size": 200,
        "moe_intermediate_size": 44,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "n_shared_experts": 2,
        "n_routed_experts": 5,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "q_lora_rank": 40,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "rms_norm_eps": 1e-5,
    },
    "wide": {
        **_BASE,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "rope_parameters": _PLAIN_ROPE,
    },
}


def make_checkpoint(name: str, path: Path) -> None:
    """Write the checkpoint `name` of `SHAPES` to `path`: float32 weights, configuration and tokenizer.

    The same name gives the same bytes on every run.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    path.mkdir(parents=True)
    vocab_size = make_tokenizer(path, SHAPES[name]["vocab_size"])
    assert vocab_size <= SHAPES[name]["vocab_size"]
    config = DeepseekV3Config(
        **SHAPES[name],
        num_key_value_heads=SHAPES[name]["num_attention_heads"],
        num_mtp_layers=0,
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=[SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(END)],
        dtype="float32",
    )
    model = DeepseekV3ForCausalLM(config)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(value.shape, generator=generator)
            if key.endswith("inv_freq"):
                continue
            if key.endswith("e_score_correction_bias"):
                value.copy_(0.2 * noise)
            elif "norm" in key:
                value.copy_(1.0 + 0.2 * noise)
            elif "embed_tokens" in key:
                value.copy_(noise)
            else:
                value.copy_(noise * (2.0 if "lm_head" in key else 1.0) / math.sqrt(value.shape[-1]))
    model.save_pretrained(path)
    # Released checkpoints name the router; save_pretrained leaves both out because this class has only one.
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "topk_method": "noaux_tc", "scoring_func": "sigmoid"}))


def make_tokenizer(path: Path, vocab_size: int) -> int:
    """Train a byte-level BPE tokenizer of at most `vocab_size` on a few sentences, save it, return its real size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "chat_template": CHAT_TEMPLATE,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )
    return tokenizer.get_vocab_size()
