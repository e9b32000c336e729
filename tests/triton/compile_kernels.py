"""Compile every kernel for a target that need not be here, and print what each one takes: run by test_compile.py.

    python -m tests.triton.compile_kernels cuda:90 [--only-attention]

One JSON line a kernel: name, shared memory in bytes, registers and bytes spilled where the compiler says.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from splash.platform.triton import absorbed, expanded, experts, fused, nucleus, pages, products, route, rows, sums
from splash.platform.triton.attention import absorbed_tiles, expanded_tiles
from splash.platform.triton.experts import GroupedTiles
from splash.platform.triton.kernels import expert_tiles
from splash.platform.triton.launch import Target
from splash.platform.triton.products import product_tiles

C, R, NOPE, VALUE, PAGE = 512, 64, 128, 128, 64  # DeepSeek-V3's, and the default page size
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
POINTERS = {  # of kernels whose pointers are not all to the data's dtype
    "segments_ptr": "*i32", "visible_ptr": "*i32", "slots_ptr": "*i32", "splits_ptr": "*i32", "blocks_ptr": "*i32",
    "lse_ptr": "*fp32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32",
    "cos_ptr": "*fp32", "sin_ptr": "*fp32", "index_ptr": "*i64", "expert_ptr": "*i64", "router_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "arrivals_ptr": "*i32",
    "pairs_ptr": "*i32", "counts_ptr": "*i32", "places_ptr": "*i32", "starts_ptr": "*i32",
    "chunks_ptr": "*i64", "regions_ptr": "*i64", "calls_ptr": "*i64",
}  # fmt: skip
ALIGNED = re.compile(r".*(_row|_head|_stride|_ptr|_a|_b)$|^(D|I|C|K|N|V)$")  # multiples of 16 in a model


def compile_kernel(
    kernel: Any,
    target: GPUTarget,
    dtype: str,
    constants: dict[str, Any],
    warps: int,
    types: dict[str, str] | None = None,
) -> Any:
    """Compile with the pointers, sizes and constants that a launch would have."""
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if types and name in types:
            signature[name] = types[name]
        elif name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = "fp32" if name in ("eps", "scale_log2", "scaling") else "i32"
        if signature[name] != "constexpr" and ALIGNED.match(name):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source_class = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_class
    source = source_class(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options: dict[str, Any] = {"num_warps": warps}
    if kernel.debug:  # as its launch has it
        options |= {"debug": True, "sanitize_overflow": False}
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Shared memory, and what the compiler says of registers and spills."""
    found = {"shared": compiled.metadata.shared}
    if "amdgcn" in compiled.asm:
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count"):
            found[name] = int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])
        return found
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        Path(file.name).write_text(compiled.asm["ptx"])
        arch = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])[1]
        tool = triton.knobs.nvidia.ptxas_blackwell if arch >= "sm_100" else triton.knobs.nvidia.ptxas
        command = [tool.path, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found["registers"] = int(re.search(r"Used (\d+) registers", text)[1])
    found["spilled"] = int(re.search(r"(\d+) bytes spill stores", text)[1])
    found["serialized"] = text.count("Potential Performance Loss")
    return found


def described(dtype: str, rows: int, columns: int, layout: str = "") -> str:
    return f"tensordesc<{dtype}[{rows},{columns}]{layout}>"


def attention_cases(target: Target, dtype: torch.dtype) -> list[tuple[str, Any, dict[str, Any], int, dict[str, str]]]:
    name, cases = NAMES[dtype], []
    t = absorbed_tiles(target, dtype)
    constants = {
        "C": C, "R": R, "BLOCK_C": C, "BLOCK_R": R, "BLOCK_M": t.rows, "BLOCK_N": t.columns, "PAGE": PAGE,
        "USE_TMA": t.tma, "STAGES": t.stages, "PRECISION": t.precision, "latents": None, "rotaries": None,
    }  # fmt: skip
    tma = {"latents": described(name, t.columns, C), "rotaries": described(name, t.columns, R)} if t.tma else {}
    cases.append(("attend", absorbed.attend_kernel, constants, t.warps, tma))
    constants = {"C": C, "BLOCK_C": C, "BLOCK_M": t.rows, "PAIRS": 1, "UNROLL": 8}
    cases.append(("merge_splits", absorbed.merge_splits_kernel, constants, 4, {}))
    t = expanded_tiles(target, dtype, VALUE)
    for windows in (False, True):
        constants = {
            "N": NOPE, "V": VALUE, "C": C, "R": R, "FIRST": NOPE, "SECOND": 0, "BLOCK_R": R, "BLOCK_V": VALUE,
            "BLOCK_M": t.rows, "BLOCK_N": t.columns, "USE_TMA": t.tma, "WINDOWS": windows, "STAGES": t.stages,
            "PRECISION": t.precision, "first_desc": None, "second_desc": None, "rotary_desc": None, "value_desc": None,
        }  # fmt: skip
        widths = {"first_desc": NOPE, "rotary_desc": R, "value_desc": VALUE}
        types = {key: described(name, t.columns, width) for key, width in widths.items()} if t.tma else {}
        if windows:
            types["out_ptr"] = "*fp32"
        cases.append((f"expanded windows={windows}", expanded.expanded_kernel, constants, t.warps, types))
    return cases


def expert_cases(target: Target, dtype: torch.dtype) -> list[tuple[str, Any, dict[str, Any], int, dict[str, str]]]:
    name, cases = NAMES[dtype], []

    def constants(t: GroupedTiles) -> dict[str, Any]:
        return {
            "HEIGHTS": t.heights, "STAGES": t.stages, "BLOCK_N": t.columns, "BLOCK_K": t.depth, "USE_TMA": t.tma,
            "HIDDEN_TMA": t.tma and len(t.heights) == 1, "SWAP": t.swap, "PRECISION": t.precision,
            "FIELDS": 3, "w13_desc": None, "w2_desc": None, "hidden_desc": None,
        }  # fmt: skip

    for pairs, num_rows in ((4, 16), (32, 128), (100, 400), (1000, 4000)):
        up, down = expert_tiles(target, dtype, pairs, num_rows)
        types = {"w13_desc": described(name, up.columns, up.depth)} if up.tma else {}
        cases.append((f"up {pairs}", experts.up_kernel, constants(up), up.warps, types))
        types = {"w2_desc": described(name, down.columns, down.depth)} if down.tma else {}
        if down.tma and len(down.heights) == 1:
            types["hidden_desc"] = described(name, down.heights[-1], down.depth)
        cases.append((f"down {pairs}", experts.down_kernel, constants(down), down.warps, types))
    return cases


def product_cases(target: Target, dtype: torch.dtype) -> list[tuple[str, Any, dict[str, Any], int, dict[str, str]]]:
    t, cases = product_tiles(target, dtype), []
    for k_inner, shape in ((True, (t.columns, t.depth)), (False, (t.depth, t.columns))):
        constants = {
            "BLOCK_M": t.rows, "BLOCK_N": t.columns, "BLOCK_K": t.depth, "K_INNER": k_inner, "USE_TMA": t.tma,
            "STAGES": t.stages, "PRECISION": t.precision, "UNROLL": 4, "weights": None, "rows": None,
        }  # fmt: skip
        if not t.tma:
            constants |= {"w_k": 1} if k_inner else {"w_n": 1}
        types = {"weights": described(NAMES[dtype], *shape)} if t.tma else {}
        types |= {"rows": described(NAMES[dtype], t.rows, t.depth)} if t.tma else {}
        cases.append((f"product k_inner={k_inner}", products.product_kernel, constants, t.warps, types))
    return cases


def small_cases() -> list[tuple[str, Any, dict[str, Any], int, dict[str, str]]]:
    words = {"source_ptr": "*i32", "target_ptr": "*i32"}
    expert = {"weight_ptr": "*fp32"}
    assigned = {"BLOCK_P": 2048, "BLOCK_E": 256, "BLOCK_B": 512, "HEIGHT": 32, "FIELDS": 3}
    nucleus_types = {"scores_ptr": "*fp32", "top_p_ptr": "*fp64", "floor_ptr": "*fp32"}
    summed = {
        "RANKS": 8, "BLOCK_T": 8, "BLOCK": 2048, "PARTS": 256, "COUNTER_BYTES": 32, "PART_BYTES": 4096,
    }  # fmt: skip
    choice = {
        "GROUPS": 8, "TOP_GROUPS": 4, "TOP_K": 8, "NORM": True, "BLOCK_G": 8, "BLOCK_S": 32, "BLOCK_K": 8,
    }  # fmt: skip
    return [
        ("rms_norm", fused.rms_norm_kernel, {"BLOCK_D": 8192, "ADD": True}, 8, {}),
        ("rotate", fused.rotate_kernel, {"BLOCK_HALF": 32, "BLOCK_H": 16}, 4, {}),
        ("latent", fused.latent_kernel, {"BLOCK_Q": 2048, "BLOCK_C": 512, "BLOCK_HALF": 32, "PAGE": 64}, 4, {}),
        ("store", fused.store_kernel, {"BLOCK_K": 1024, "PAGE": 64}, 4, {}),
        ("silu_and_mul", fused.silu_and_mul_kernel, {"BLOCK_I": 1024}, 4, {}),
        ("gather", rows.gather_kernel, {"BLOCK": 1024, "WORDS": True}, 4, words),
        ("copy_chunks", pages.copy_chunks_kernel, {"BLOCK": 16384, "WORDS": True}, 16, {}),
        ("copy_chunks of bytes", pages.copy_chunks_kernel, {"BLOCK": 16384, "WORDS": False}, 16, {}),
        ("scores", route.scores_kernel, {"BLOCK_N": 32, "BLOCK_E": 64, "BLOCK_K": 64, "DEPTH": 256}, 4, {}),
        ("choose", route.choose_kernel, choice, 1, expert),
        ("assign", experts.assign_kernel, assigned, 4, {}),
        ("count", experts.count_kernel, {"BLOCK": 256}, 4, {}),
        ("offsets", experts.offsets_kernel, {"BLOCK_E": 256, "BLOCK": 32, "HEIGHT": 128, "FIELDS": 3}, 4, {}),
        ("place", experts.place_kernel, {"BLOCK": 256}, 4, {}),
        ("nucleus", nucleus.nucleus_kernel, {"BLOCK": 4096, "STAGES": 4}, 16, nucleus_types),
        ("sum", sums.sum_kernel, summed, 4, {}),
        ("combine", experts.combine_kernel, {"TOP_K": 8, "BLOCK_D": 1024, "ADD": True}, 4, expert),
    ]


def hopper_cases() -> list[tuple[str, Any, dict[str, Any], int, dict[str, str]]]:
    from triton.experimental.gluon import language as gl

    from splash.platform.triton import hopper, hopper_expanded

    layout = f",{gl.NVMMASharedLayout(128, 16, rank=2)!r}"
    constants = {"C": C, "R": R, "ROWS": hopper.ROWS, "KEYS": hopper.KEYS, "PAGE": PAGE, "PIECES": 2}
    types = {
        "latents": described("bf16", hopper.KEYS, C, layout),
        "rotaries": described("bf16", hopper.KEYS, R, layout),
    }
    cases = [("hopper attend", hopper.attend_kernel, constants, hopper.WARPS, types)]
    for model, nope, value, first, second, keys in (
        ("deepseek", 128, 128, 128, 0, 128),
        ("glm", 192, 256, 128, 64, 64),
    ):
        constants = {
            "N": nope, "V": value, "C": C, "R": R, "FIRST": first, "SECOND": second, "KEYS": keys, "WINDOWS": False,
        }  # fmt: skip
        widths = {"first_desc": first, "second_desc": second or first, "rotary_desc": R, "value_desc": value}
        types = {key: described("bf16", keys, width, layout) for key, width in widths.items()}
        cases.append((f"hopper expanded {model}", hopper_expanded.expanded_kernel, constants, 4, types))
    return cases


def main(name: str, only_attention: bool) -> None:
    kind, _, arch = name.partition(":")
    if kind == "cuda":
        gpu, target = GPUTarget("cuda", int(arch), 32), Target("cuda", int(arch) // 10, 132)
    else:
        gpu, target = GPUTarget("hip", arch, 64), Target("hip", 0, 304)
    cases = [(case, torch.bfloat16) for case in attention_cases(target, torch.bfloat16)]
    if not only_attention:
        cases += [(case, torch.bfloat16) for case in small_cases() + expert_cases(target, torch.bfloat16)]
        cases += [(case, torch.bfloat16) for case in product_cases(target, torch.bfloat16)]
        cases += [(case, torch.float32) for case in attention_cases(target, torch.float32)]
    if target.capability == 9:
        cases += [(case, torch.bfloat16) for case in hopper_cases()]
    for (case, kernel, constants, warps, types), dtype in cases:
        compiled = compile_kernel(kernel, gpu, NAMES[dtype], constants, warps, types)
        print(json.dumps({"name": f"{case} {NAMES[dtype]}", **resources(compiled)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--only-attention" in sys.argv)
