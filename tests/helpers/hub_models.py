"""Tiny models of every family of the hub, the same in every environment.

Weights come from a generator seeded by their names, so a folder can be written
here, read by `transformers` elsewhere, and the logits be compared.
"""

import json
import zlib

import numpy as np

from jaxpruner import sparse
from jaxpruner.post_training.models import decoder_config, encoder

_BASE = {
  "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24,
  "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
  "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROPE3 = {
  "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0,
  "low_freq_factor": 1.0, "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}  # fmt: skip
_YARN = {
  "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
  "original_max_position_embeddings": 16,
}  # fmt: skip
_GEMMA = _BASE | {
  "head_dim": 8, "hidden_activation": "gelu_pytorch_tanh",
  "query_pre_attn_scalar": 8, "sliding_window": 3, "tie_word_embeddings": True,
}  # fmt: skip
_MOE = {
  "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
}  # fmt: skip
CONFIGS = {
  "llama2": _BASE | {"model_type": "llama"},
  "llama3": _BASE | {"model_type": "llama", "rope_parameters": _ROPE3,
                     "attention_bias": True, "mlp_bias": True},
  "smollm2": _BASE | {"model_type": "llama", "rope_theta": 1e5,
                      "tie_word_embeddings": True},
  "mistral": _BASE | {"model_type": "mistral", "sliding_window": 3,
                      "head_dim": 6},
  "qwen2": _BASE | {"model_type": "qwen2", "use_sliding_window": True,
                    "sliding_window": 3, "max_window_layers": 1},
  "qwen3": _BASE | {"model_type": "qwen3", "head_dim": 8,
                    "rope_parameters": _YARN},
  "gemma2": _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0,
                      "final_logit_softcapping": 3.0},
  "gemma3": _GEMMA | {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention",
                    "sliding_attention"],
    "rope_parameters": {
      "full_attention": {"rope_type": "linear", "rope_theta": 1e4,
                         "factor": 2.0},
      "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
  },
  "opt": {
    "model_type": "opt", "vocab_size": 32, "hidden_size": 16, "ffn_dim": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 16,
    "activation_function": "relu", "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1,
  },
  "mixtral": _BASE | {"model_type": "mixtral", "num_local_experts": 4,
                      "num_experts_per_tok": 2},
  "qwen2_moe": _BASE | _MOE | {
    "model_type": "qwen2_moe", "shared_expert_intermediate_size": 12,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": False,
  },
  "qwen3_moe": _BASE | _MOE | {
    "model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
  },
  "bert": {
    "model_type": "bert", "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12, "pad_token_id": 0,
  },
  "vit": {
    "model_type": "vit", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4, "num_channels": 3, "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
  },
}  # fmt: skip
TOKENS = np.array([[1, 5, 30, 7, 7, 2, 19, 11], [1, 3, 4, 31, 0, 8, 9, 25]])
IMAGES = np.sin(np.arange(2 * 3 * 64, dtype=np.float32)).reshape(2, 3, 8, 8)


def inputs(family):
  return IMAGES if family == "vit" else TOKENS


def weight(name, shape):
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  array = rng.normal(size=shape) * (0.3 if len(shape) > 1 else 0.2)
  if name.endswith("norm.weight") or "LayerNorm.weight" in name:
    array += 1
  return array.astype(np.float32)


def parsed(family, **changes):
  config = CONFIGS[family] | changes
  module = encoder if family in ("bert", "vit") else decoder_config
  return module.parse(config)


def write_folder(folder, family, shards=2, **changes):
  """Write a folder as `save_pretrained` does; return its tensors."""
  folder.mkdir(parents=True, exist_ok=True)
  tensors = {
    n: weight(n, s) for n, s in parsed(family, **changes).shapes().items()
  }
  where = {}
  names = list(tensors)
  for i in range(shards):
    file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
    part = {n: tensors[n] for n in names[i::shards]}
    sparse.save(folder / file, part, layout="dense", metadata={"format": "pt"})
    where |= dict.fromkeys(part, file)
  index = {"metadata": {"total_size": 0}, "weight_map": where}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  (folder / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
  return tensors
