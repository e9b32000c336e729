"""Arena geometry and what fits in it, checked against counting bytes and pages one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash.core.capacity import attention_bytes, capacity, freed_bytes, geometry_for_budget, page_loads, page_slots
from splash.core.errors import CapacityError, ConfigError
from splash.core.hardware import Hardware
from splash.core.layout import CP, DOP, DP, LAYOUTS, TP, Layout, Projections
from splash.core.memory import ALIGNMENT, ArenaGeometry, slots_for
from splash.core.ownership import page_holders, weight_holders
from splash.core.spec import IndexerSpec, KVFormat, ModelSpec, RopeSpec, kv_format

MIB = 1 << 20
SPEC = ModelSpec(
    architecture="DeepseekV3ForCausalLM",
    num_layers=3,
    hidden_size=96,
    vocab_size=320,
    num_heads=8,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=20,
    intermediate_size=128,
    first_dense_layers=3,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
)
DEEPSEEK_V3 = replace(
    SPEC,
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
GLM_5 = replace(
    DEEPSEEK_V3,
    num_layers=78,
    hidden_size=6144,
    num_heads=64,
    q_lora_rank=2048,
    qk_nope_head_dim=192,
    v_head_dim=256,
    indexer=IndexerSpec(num_heads=32, head_dim=128, top_k=2048),
)
layouts = st.sampled_from(list(LAYOUTS.values()))
rank_counts = st.sampled_from([1, 2, 4, 8])


@st.composite
def geometries(draw: st.DrawFn) -> ArenaGeometry:
    """Arenas of every proportion: weights of a few slots to hundreds."""
    kv = KVFormat(draw(st.integers(40, 600)), draw(st.integers(0, 40)))
    geometry = ArenaGeometry(SPEC, kv, draw(st.sampled_from([4, 16, 64])), 2, draw(rank_counts), 1 << 30)
    return replace(geometry, num_slots=geometry.num_weight_slots + draw(st.integers(0, 80)))


@given(geometries())
def test_modules_lie_apart_and_start_aligned(geometry: ArenaGeometry) -> None:
    end = 0
    for name, (offset, size) in geometry.modules.items():
        assert offset % ALIGNMENT == 0 and end <= offset < end + ALIGNMENT
        assert size == SPEC.head_elements()[name] * SPEC.num_heads * geometry.weight_bytes
        end = offset + size
    assert geometry.num_weight_slots * geometry.slot_bytes >= end
    assert geometry.arena_bytes == geometry.num_slots * geometry.slot_bytes


@given(geometries())
def test_head_groups_cut_every_module_into_equal_runs(geometry: ArenaGeometry) -> None:
    for name, (offset, size) in geometry.modules.items():
        runs = [geometry.run(name, group) for group in range(geometry.ranks)]
        assert [start for start, _ in runs] == [offset + size // geometry.ranks * g for g in range(geometry.ranks)]
        assert sum(length for _, length in runs) == size


@given(geometries(), layouts)
def test_resident_runs_are_the_head_groups_that_the_rank_holds(geometry: ArenaGeometry, layout: Layout) -> None:
    held = weight_holders(layout, geometry.ranks)
    for rank in range(geometry.ranks):
        bytes_held = {
            byte
            for name in geometry.modules
            for group in np.flatnonzero(held[:, rank]).tolist()
            for byte in _ends(geometry.run(name, group))
        }
        runs = geometry.resident_runs(layout, rank)
        assert sum(size for _, size in runs) == attention_bytes(geometry, layout)[rank]
        assert all(any(start <= byte < start + size for start, size in runs) for byte in bytes_held)


def _ends(run: tuple[int, int]) -> tuple[int, int]:
    return run[0], run[0] + run[1] - 1


@given(geometries(), layouts)
def test_a_slot_holds_pages_iff_no_resident_byte_lies_in_it(geometry: ArenaGeometry, layout: Layout) -> None:
    for rank in range(geometry.ranks):
        free = [
            slot
            for slot in range(geometry.num_slots)
            if not any(
                offset < (slot + 1) * geometry.slot_bytes and slot * geometry.slot_bytes < offset + size
                for offset, size in geometry.resident_runs(layout, rank)
            )
        ]
        assert geometry.page_slots(layout, rank).tolist() == free
        assert len(free) == page_slots(geometry, layout)[rank]


@given(geometries())
def test_sharding_never_has_fewer_page_slots_than_replicating(geometry: ArenaGeometry) -> None:
    assert (page_slots(geometry, DOP) >= page_slots(geometry, DP)).all()
    assert len(set(page_slots(geometry, DP).tolist())) == 1


def test_arenas_too_small_for_the_weights_are_refused_with_the_numbers() -> None:
    fits = geometry_for_budget(SPEC, KVFormat(64), 16, 2, 2, budget_bytes=3 * MIB)
    with pytest.raises(CapacityError, match=rf"{fits.num_weight_slots - 1} slots.*take {fits.num_weight_slots} slots"):
        replace(fits, num_slots=fits.num_weight_slots - 1)
    for budget in (0, -5, 3000):
        with pytest.raises(CapacityError):
            geometry_for_budget(SPEC, KVFormat(64), 16, 2, 2, budget_bytes=budget)


@given(st.integers(1, 64), st.integers(20_000, 4 * MIB))
def test_a_budget_is_used_to_the_last_slot_and_never_exceeded(page_size: int, per_layer: int) -> None:
    kv = kv_format(SPEC, "bfloat16")
    num_slots = slots_for(SPEC, kv, page_size, 2, per_layer)
    assert num_slots * page_size * kv.token_bytes <= per_layer < (num_slots + 1) * page_size * kv.token_bytes


@given(layouts, st.integers(1, 9), st.integers(0, 60), st.data())
def test_page_loads_count_what_holders_say(layout: Layout, ranks: int, num_pages: int, data: st.DataObject) -> None:
    requests = np.array(data.draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks)), dtype=np.int64)
    owners = np.repeat(np.repeat(np.arange(ranks), requests), num_pages)
    numbers = np.tile(np.arange(num_pages), int(requests.sum()))
    counted = page_holders(numbers, owners, layout, ranks).sum(axis=0)
    assert page_loads(layout, ranks, num_pages, requests).tolist() == counted.tolist()


@given(geometries(), layouts, st.integers(1, 20))
def test_the_longest_context_fits_and_one_page_more_does_not(
    geometry: ArenaGeometry, layout: Layout, batch: int
) -> None:
    pages = capacity(geometry, layout, batch).longest_context // geometry.page_size
    slots = page_slots(geometry, layout)

    def fits(num_pages: int) -> bool:
        owners = np.repeat(np.arange(batch) % geometry.ranks, num_pages)
        numbers = np.tile(np.arange(num_pages), batch)
        return bool((page_holders(numbers, owners, layout, geometry.ranks).sum(axis=0) <= slots).all())

    assert fits(pages) and not fits(pages + 1)


@given(geometries(), layouts)
def test_kv_tokens_are_every_ranks_slots_at_balanced_load(geometry: ArenaGeometry, layout: Layout) -> None:
    fitting = capacity(geometry, layout, batch=geometry.ranks)
    copies = page_holders(np.arange(geometry.ranks), np.arange(geometry.ranks), layout, geometry.ranks)[0].sum()
    assert fitting.page_slots == page_slots(geometry, layout).min()
    assert fitting.kv_tokens == fitting.page_slots * geometry.ranks // copies * geometry.page_size
    # Uneven slots can favour the ranks that hold the first pages, so the bound is all slots, not T times the least.
    assert fitting.longest_context * geometry.ranks <= page_slots(geometry, layout).sum() // copies * geometry.page_size


def test_capacity_of_a_layout_that_cannot_shard_is_refused() -> None:
    geometry = geometry_for_budget(SPEC, KVFormat(64), 16, 2, 3, budget_bytes=3 * MIB)
    with pytest.raises(ConfigError, match="3 ranks do not divide 8 heads"):
        capacity(geometry, TP, batch=1)
    assert capacity(geometry, DP, batch=1).attention_bytes == 3 * geometry.attention_bytes


def test_deepseek_v3_attention_is_328_mib_a_layer() -> None:
    geometry = geometry_for_budget(DEEPSEEK_V3, kv_format(DEEPSEEK_V3, "bfloat16"), 64, 2, 8, 64 << 30)
    assert geometry.attention_bytes == 328 * MIB
    assert attention_bytes(geometry, DP).tolist() == [328 * MIB] * 8
    assert attention_bytes(geometry, TP).tolist() == [41 * MIB] * 8
    assert freed_bytes(geometry, DOP, baseline=CP) == 61 * 287 * MIB
    assert freed_bytes(geometry, DOP, baseline=TP) == 0


def test_bytes_of_a_cached_token() -> None:
    assert kv_format(DEEPSEEK_V3, "bfloat16").token_bytes == 1152
    assert kv_format(DEEPSEEK_V3, "fp8").token_bytes == 656
    assert kv_format(GLM_5, "fp8") == KVFormat(latent_bytes=656, indexer_bytes=132)
    assert kv_format(GLM_5, "fp8").token_bytes == 788


def test_what_dop_frees_is_slots_for_pages() -> None:
    """The bytes that sharding does without come back as page slots, but for the slots at the ends of runs."""
    geometry = geometry_for_budget(GLM_5, kv_format(GLM_5, "fp8"), 64, 1, 8, 60 << 30)
    weights = freed_bytes(geometry, DOP, baseline=DP)
    slots = capacity(geometry, DOP, 16).page_slots - capacity(geometry, DP, 16).page_slots
    pages = slots * geometry.slot_bytes * GLM_5.num_layers
    runs = len(geometry.modules)
    assert weights == 78 * 64 * (256 * 2048 + 448 * 512 + 256 * 6144) * 7 // 8
    assert weights - (runs + 1) * geometry.slot_bytes * GLM_5.num_layers <= pages <= weights


@pytest.mark.parametrize("name", [n for n, layout in LAYOUTS.items() if layout.projections is Projections.SHARDED])
def test_a_rank_short_of_slots_limits_the_group(name: str) -> None:
    """Ranks differ by a slot where runs straddle slots; the balanced load is what the fullest rank takes."""
    geometry = ArenaGeometry(SPEC, KVFormat(61), 16, 2, 8, num_slots=120)
    slots = page_slots(geometry, LAYOUTS[name])
    assert len(set(slots.tolist())) > 1, "this geometry is meant to be uneven"
    assert capacity(geometry, LAYOUTS[name], 8).page_slots == slots.min()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("platform", "tpu"),
        ("ranks", 0),
        ("memory_gib", 0.0),
        ("link_gb_s", float("inf")),
        ("fp8_tflops", 0.0),
        ("reserve_gib", -1.0),
        ("reserve_gib", 64.0),
        ("bf16_tflops", float("nan")),
        ("memory_gb_s", -1.0),
    ],
)
def test_impossible_hardware_is_refused_by_field(field: str, value: object) -> None:
    fine = Hardware("x", "cuda", 8, 64.0, 1.0, 100.0, None, 1000.0, 50.0)
    with pytest.raises(ConfigError) as caught:
        replace(fine, **{field: value})
    assert caught.value.field == f"hardware.{field}"
