# SPDX-License-Identifier: Apache-2.0
"""In place of SGLang's kernels, which are for GPUs and for CPUs with AMX: names that SGLang imports exist
here, and calling one fails. SGLang's layers have a native path, which it takes where there is no AMX.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0+none"
_OPS = torch.library.Library("sgl_kernel", "FRAGMENT")
_NAMES = """
apply_multidimensional_rope apply_rotary_pos_emb biased_grouped_topk bmm conv3d_embed decode_attention
extend_attention fp8_per_tensor_scaled_mm fp8_scaled_mm fused_add_rmsnorm fused_dual_residual_rmsnorm
fused_experts fused_gdn_gating fused_input_proj fused_moe_router fused_norm_scale_shift
fused_qk_gemma_rmsnorm fused_qk_gemma_rmsnorm_with_gate fused_qk_norm fused_qk_norm_rope
fused_qk_rmsnorm_apply_from_stats fused_qk_rmsnorm fused_qk_rmsnorm_sumsq
fused_qkvzba_split_reshape_cat_contiguous fused_qkvzba_split_reshape_cat fused_rmsnorm_gated
fused_scale_residual_norm_scale_shift fused_scale_shift fused_sigmoid_gating_delta_rule_update
fused_sigmoid_mul gelu_and_mul gelu_tanh_and_mul gemma3_rmsnorm gemma4_rmsnorm gemma_fused_add_rmsnorm
gemma_rmsnorm grouped_topk image_preprocess int4_scaled_mm l2norm layernorm multimodal_rotary_embedding
murmur_hash32 rmsnorm rotary_embedding shared_expert silu_and_mul store_cache topk_sigmoid topk_softmax
"""


def _refused(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"no sgl_kernel here: {name}")

    return call


def _submodule(name: str, *names: str) -> types.ModuleType:
    module = types.ModuleType(f"sgl_kernel.{name}")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    for each in names:
        setattr(module, each, _refused(each))
    sys.modules[module.__name__] = module
    return module


def __getattr__(name: str) -> Callable[..., Any]:
    if name.endswith("_cpu"):
        return _refused(name)
    raise AttributeError(name)


mamba = _submodule("mamba", "chunk_gated_delta_rule_cpu", "causal_conv1d_fn_cpu", "causal_conv1d_update_cpu")
for _name in _NAMES.split():  # SGLang registers shapes for operators, which must exist for that
    _OPS.define(f"{_name}_cpu(Tensor x) -> Tensor")
