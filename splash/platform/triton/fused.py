"""The small operations around attention, each one pass over its rows, in float32 inside.

Results are rounded where Hugging Face's modules round them: a norm before its weight, SiLU before its product.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, x_row, residual_row, D,
    BLOCK_D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One row a program; with ADD the row is x + residual, which is kept as well."""
    row = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, BLOCK_D)
    mask_D = d_D < D
    x_D = tl.load(x_ptr + row * x_row + d_D, mask=mask_D, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    if ADD:
        x_D += tl.load(residual_ptr + row * residual_row + d_D, mask=mask_D, other=0.0).to(tl.float32)
        x_D = x_D.to(dtype).to(tl.float32)
        tl.store(sum_ptr + row * D + d_D, x_D, mask=mask_D)
    normed_D = (x_D * tl.rsqrt(tl.sum(x_D * x_D) / D + eps)).to(dtype).to(tl.float32)
    weight_D = tl.load(weight_ptr + d_D, mask=mask_D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d_D, normed_D * weight_D, mask=mask_D)


@triton.jit
def rotate_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, num_heads, x_row, x_head, out_row, out_head, HALF,
    BLOCK_HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one row a program. `out` may be `x`: a program reads what it writes before writing it."""
    row = tl.program_id(0).to(tl.int64)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r_R = tl.arange(0, BLOCK_HALF)
    cos_R = tl.load(cos_ptr + row * HALF + r_R, mask=r_R < HALF, other=0.0)[None, :]
    sin_R = tl.load(sin_ptr + row * HALF + r_R, mask=r_R < HALF, other=0.0)[None, :]
    mask_HR = (head_H < num_heads)[:, None] & (r_R < HALF)[None, :]
    x_HR = x_ptr + row * x_row + head_H[:, None] * x_head + r_R[None, :]
    first_HR = tl.load(x_HR, mask=mask_HR, other=0.0).to(tl.float32)
    second_HR = tl.load(x_HR + HALF, mask=mask_HR, other=0.0).to(tl.float32)
    out_HR = out_ptr + row * out_row + head_H[:, None] * out_head + r_R[None, :]
    tl.store(out_HR, first_HR * cos_R - second_HR * sin_R, mask=mask_HR)
    tl.store(out_HR + HALF, second_HR * cos_R + first_HR * sin_R, mask=mask_HR)


@triton.jit
def _norm_row(x_ptr, weight_ptr, out_ptr, eps, D, BLOCK_D: tl.constexpr):
    dtype = x_ptr.dtype.element_ty
    d_D = tl.arange(0, BLOCK_D)
    x_D = tl.load(x_ptr + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    normed_D = (x_D * tl.rsqrt(tl.sum(x_D * x_D) / D + eps)).to(dtype).to(tl.float32)
    weight_D = tl.load(weight_ptr + d_D, mask=d_D < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + d_D, (normed_D * weight_D).to(dtype), mask=d_D < D)


@triton.jit
def latent_kernel(
    down_ptr, q_weight_ptr, kv_weight_ptr, cos_ptr, sin_ptr, index_ptr, query_ptr, out_ptr, eps, down_row, slot_stride,
    key_stride, Q, C, HALF, BLOCK_Q: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One row of [query | latent | rotary key]: program (row, 1) norms the query, (row, 0) makes what is cached.

    That goes to the row's own place, or (PAGE > 0) into the cache; a negative index stores nothing.
    """
    row = tl.program_id(0).to(tl.int64)
    down_ptr += row * down_row
    if tl.program_id(1) == 1:
        _norm_row(down_ptr, q_weight_ptr, query_ptr + row * Q, eps, Q, BLOCK_Q)
        return
    if PAGE > 0:
        index = tl.load(index_ptr + row)
        if index < 0:
            return
        out_ptr += (index // PAGE).to(tl.int64) * slot_stride + (index % PAGE) * key_stride
    else:
        out_ptr += row * key_stride
    down_ptr += Q
    _norm_row(down_ptr, kv_weight_ptr, out_ptr, eps, C, BLOCK_C)
    dtype = down_ptr.dtype.element_ty
    r_R = tl.arange(0, BLOCK_HALF)
    mask_R = r_R < HALF
    cos_R = tl.load(cos_ptr + row * HALF + r_R, mask=mask_R, other=0.0)
    sin_R = tl.load(sin_ptr + row * HALF + r_R, mask=mask_R, other=0.0)
    first_R = tl.load(down_ptr + C + r_R, mask=mask_R, other=0.0).to(tl.float32)
    second_R = tl.load(down_ptr + C + HALF + r_R, mask=mask_R, other=0.0).to(tl.float32)
    tl.store(out_ptr + C + r_R, (first_R * cos_R - second_R * sin_R).to(dtype), mask=mask_R)
    tl.store(out_ptr + C + HALF + r_R, (second_R * cos_R + first_R * sin_R).to(dtype), mask=mask_R)


@triton.jit
def store_kernel(
    rows_ptr, index_ptr, pages_ptr, rows_row, slot_stride, key_stride, K, BLOCK_K: tl.constexpr, PAGE: tl.constexpr
):
    """One row a program into the cache; a negative index stores nothing."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row)
    if index < 0:
        return
    k_K = tl.arange(0, BLOCK_K)
    x_K = tl.load(rows_ptr + row * rows_row + k_K, mask=k_K < K, other=0.0)
    place = (index // PAGE).to(tl.int64) * slot_stride + (index % PAGE) * key_stride
    tl.store(pages_ptr + place + k_K, x_K, mask=k_K < K)


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, x_row, I, BLOCK_I: tl.constexpr):  # noqa: E741
    row = tl.program_id(0).to(tl.int64)
    i_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    gate_I = tl.load(x_ptr + row * x_row + i_I, mask=i_I < I, other=0.0).to(tl.float32)
    up_I = tl.load(x_ptr + row * x_row + I + i_I, mask=i_I < I, other=0.0).to(tl.float32)
    silu_I = (gate_I / (1.0 + tl.exp(-gate_I))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * I + i_I, silu_I * up_I, mask=i_I < I)
