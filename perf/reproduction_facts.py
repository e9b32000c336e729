"""What follows from shapes, memory and the cost model alone, for `perf.reproduction`: sizes, capacities, switches."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from splash.core.capacity import capacity as capacity_of
from splash.core.capacity import geometry_for_budget, page_slots
from splash.core.hardware import GIB, Hardware
from splash.core.layout import CP, DOP, DP, TP, Layout
from splash.core.spec import kv_format
from splash.plan import Plan, PlanSettings, make_plan
from splash.scheduler.cost_model import CostModel
from splash.scheduler.footprint import Footprint, received_weight_bytes
from splash.scheduler.load import StepLoad
from splash.settings import build, compose

PAPER = (TP, DP, CP, DOP)
CONTEXT = 262144
FLASH = ("model=glm_5", "model.config.num_hidden_layers=47", "model.config.n_routed_experts=64")
MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """What SPLASH has for a statement.

    Attributes:
        statement: its name in perf/paper.json.
        value: the figure in the statement's unit, or its least and largest.
        remark: what it is of, and anything to know.
    """

    statement: str
    value: float | Sequence[float]
    remark: str = ""


@lru_cache(maxsize=16)
def plan(*overrides: str) -> Plan:
    """The plan of a command line of `splash.plan`, with the model's length extended to 1M."""
    extended = "model.config.max_position_embeddings=1048576"
    return make_plan(build(PlanSettings, compose("plan", [*overrides, extended])))


def sizes() -> list[Finding]:
    """Bytes, and what each direction moves."""
    bf16 = plan("model=deepseek_v3", "hardware=h200", "ranks=8", "dtype=bfloat16")
    fp8 = plan("model=deepseek_v3", "hardware=h200", "ranks=8", "dtype=fp8")
    glm = plan("model=glm_5", "hardware=b200", "dtype=fp8")
    assert glm.dop_frees_bytes is not None
    names = [layout.name for layout in PAPER]
    directions = [glm.switches[pair] for pair in itertools.permutations(names, 2)]
    kv, weights = Counter(each.kv for each in directions), Counter(each.weights for each in directions)
    return [
        Finding("attention_mib", bf16.geometry.attention_bytes / MIB),
        Finding("received_bf16_mib", float(bf16.switches["dop", "dp"].weight_bytes_per_rank) / MIB),
        Finding("received_fp8_mib", float(fp8.switches["dop", "dp"].weight_bytes_per_rank) / MIB),
        Finding("freed_gib", glm.dop_frees_bytes / GIB, "of GLM-5's public shape"),
        Finding("kv_bytes", glm.geometry.kv.token_bytes, "656 + 132"),
        Finding("kv_gathers", kv["all_gather"]),
        Finding("kv_exchanges", kv["all_to_all"]),
        Finding("kv_still", kv["discard"] + kv["none"]),
        Finding("weight_gathers", weights["all_gather"]),
    ]


def capacities() -> list[Finding]:
    """KV tokens by layout."""
    b200 = plan("model=glm_5", "hardware=b200", "dtype=fp8")
    h200 = plan("model=deepseek_v3_2", "hardware=h200", "dtype=fp8")
    dcu = plan(*FLASH, "hardware=dcu", "dtype=fp8")
    more = sorted(_more(each, DOP, DP) for each in (b200, h200, dcu))
    owner = {layout: dcu.capacities[layout.name].kv_tokens / 8 for layout in (DOP, DP)}
    scenario = _scenario()
    of_glm = "GLM-5, 8 GiB assumed for graphs and workspace"
    return [
        Finding("b200_tokens", b200.capacities["dop"].kv_tokens, of_glm),
        Finding("b200_over_dp", _more(b200, DOP, DP), "DOP frees less of GLM-5 than of GLM-5.3, see above"),
        Finding("b200_over_cp", _more(b200, DOP, CP), "CP holds as much as DP-attention here"),
        Finding(
            "b200_resident_dop", _resident(b200, DOP), "whole requests on owners; the group's tokens would hold 14"
        ),
        Finding("b200_resident_dp", _resident(b200, DP), "whole requests on owners; the group's tokens would hold 11"),
        Finding("dcu_owner_dop", owner[DOP], "the stand-in; that it comes so near is chance"),
        Finding("dcu_owner_dp", owner[DP], "the stand-in"),
        Finding("dcu_over_dp", _more(dcu, DOP, DP), "the stand-in"),
        Finding("more_capacity", (more[0], more[-1]), "B200, H200 and DCU"),
        *(
            Finding(f"scenario_{layout.name}", scenario[layout] / 1e3, "the stand-in, 51.8 GiB for weights and KV")
            for layout in PAPER
        ),
    ]


def _more(of: Plan, layout: Layout, than: Layout) -> float:
    return (of.capacities[layout.name].kv_tokens / of.capacities[than.name].kv_tokens - 1) * 100


def _resident(of: Plan, layout: Layout) -> int:
    """Requests of 512K that fit, each whole on its owner."""
    pages = 2 * CONTEXT // of.geometry.page_size
    return int((page_slots(of.geometry, layout) // pages).sum())


def _scenario() -> dict[Layout, int]:
    """Longest input of 16 equal requests with 52.8 GiB a rank for attention weights and KV, less 1 GiB."""
    spec = plan(*FLASH, "hardware=dcu", "dtype=fp8").spec
    geometry = geometry_for_budget(spec, kv_format(spec, "fp8"), 64, 1, 8, int(51.8 * GIB))
    return {layout: capacity_of(geometry, layout, 16).longest_context for layout in PAPER}


def cost_model(*overrides: str) -> CostModel:
    """The cost model of a plan, in FP8."""
    of = plan(*overrides, "dtype=fp8")
    hardware: Hardware = of.settings.hardware
    return CostModel(of.spec, hardware, of.geometry.ranks, "fp8")


def switches() -> list[Finding]:
    """Primitives of one layer, and whole switches."""
    b200, h200 = cost_model("model=glm_5", "hardware=b200"), cost_model("model=deepseek_v3_2", "hardware=h200")
    dcu = cost_model(*FLASH, "hardware=dcu")
    chunk = StepLoad.prefill(16, 8192, CONTEXT - 8192, 8)  # a step of 16 chunks: long enough to hide a layer behind
    pairs = list(itertools.permutations(PAPER, 2))
    live = {pair: b200.switch(*pair, chunk, "layerwise") for pair in pairs}
    blocking = {pair: b200.switch(*pair, chunk, "blocking") for pair in pairs}
    networked = [pair for pair in pairs if any(live[pair].kv_bytes) or any(live[pair].weight_bytes)]
    saved = [100 * (1 - live[pair].exposed_s / blocking[pair].exposed_s) for pair in networked]
    overhead = sorted(cost.exposed_s * 1e3 for cost in live.values())
    step = b200.step(CP, chunk).seconds
    spread = "the all-to-alls and the all-gathers into TP; the paper has both alike"
    return [
        Finding("b200_kv_ms", _kv_ms(b200, CONTEXT), spread),
        Finding("b200_weights_ms", _weights_ms(b200), "GLM-5's are 26 % fewer bytes; pulls by a copy engine"),
        Finding("h200_weights_ms", _weights_ms(h200), "pulls by a copy engine, measured on two H200"),
        Finding("dcu_kv_ms", _kv_ms(dcu, CONTEXT // 2), f"{spread}; not independent: the link's rate is the paper's"),
        Finding("dcu_weights_ms", _weights_ms(dcu), "not independent: the link's rate is derived from this figure"),
        Finding(
            "b200_overhead_ms",
            (overhead[0], overhead[-1]),
            f"least and largest of 12, 16 x 256K, in a step of {step * 1e3:,.0f} ms; 0.5 ms is an assumed constant",
        ),
        Finding("b200_blocking_ms", blocking[DOP, CP].exposed_s * 1e3, "see the all-to-all above"),
        Finding("b200_saved", (min(saved), max(saved)), f"{len(networked)} directions"),
    ]


def _kv_ms(model: CostModel, context: int) -> tuple[float, float]:
    """Least and largest over the directions in which pages cross the network, for 16 requests."""
    footprint = Footprint.of(StepLoad.decode(16, context, 8), model.page_size)
    costs = model.stages.costs
    times = set()
    for source, target in itertools.permutations(PAPER, 2):
        pages = int(max(footprint.received(source, target).max(), footprint.sent(source, target).max()))
        if pages:
            size = pages * model.geometry.slot_bytes
            times.add(costs.pull_us / 1e3 + size / (costs.page_pull_gb_s * 1e6))
    return min(times), max(times)


def _weights_ms(model: CostModel) -> float:
    costs = model.stages.costs
    return costs.pull_us / 1e3 + received_weight_bytes(model.geometry, DOP, DP) / (costs.pull_gb_s * 1e6)
