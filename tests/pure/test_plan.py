"""`python -m splash.plan`: its figures are facts of the models, and what it refuses it refuses in one line."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from splash.core.hardware import Hardware
from splash.core.layout import LAYOUTS
from splash.model.config import SERVABLE, check_servable, parse_model_config
from splash.plan import PlanSettings, main, make_plan
from splash.settings import build, compose, options

ROOT = Path(__file__).parents[2]
MIB, GIB = 1 << 20, 1 << 30
PAPER = ("tp", "dp", "cp", "dop")


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "format=json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and len(printed.out.splitlines()) == 1
    return json.loads(printed.out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    return printed.err


def test_deepseek_v3_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "model=deepseek_v3", "+hardware=h200", "ranks=8")
    assert plan["model"] == "deepseek_v3" and plan["hardware"] == "h200" and plan["ranks"] == 8
    assert plan["attention_bytes_per_layer"] == 328 * MIB
    assert plan["kv_bytes_per_token_per_layer"] == 1152
    assert plan["layouts"]["dp"]["attention_bytes_per_rank"] == 61 * 328 * MIB
    assert plan["layouts"]["dop"]["attention_bytes_per_rank"] == 61 * 41 * MIB
    gathers = {name for name, switch in plan["switches"].items() if switch["weights"] == "all_gather"}
    assert gathers == {f"{src}->{dst}" for src in ("tp", "dop", "dcp") for dst in ("dp", "cp")}
    assert {plan["switches"][name]["weight_bytes_per_rank"] for name in gathers} == {287 * MIB}
    assert plan["shortage"] and plan["layouts"]["dop"]["kv_tokens"] == 0, "671 B parameters do not fit in bfloat16"


def test_deepseek_v3_in_fp8_fits_and_receives_half(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "model=deepseek_v3", "hardware=h200", "dtype=fp8")
    assert plan["switches"]["dop->cp"]["weight_bytes_per_rank"] == 143.5 * MIB
    assert plan["kv_bytes_per_token_per_layer"] == 656 and plan["shortage"] is None
    tokens = {name: layout["kv_tokens"] for name, layout in plan["layouts"].items()}
    assert tokens["dop"] == tokens["dcp"] > tokens["dp"] == tokens["cp"] > tokens["tp"] > 0


def test_glm_5_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "model=glm_5", "hardware=b200", "dtype=fp8", "ranks=8")
    assert plan["kv_bytes_per_token_per_layer"] == 788
    # 64 heads of Q-B 256 x 2048, KV-B 448 x 512 and O 256 x 6144, less a rank's eighth, in 78 layers. (The paper's
    # 12.69 GiB are of GLM-5.3, whose dimensions are not public.)
    assert plan["dop_frees_bytes_per_rank_over_dp"] == 78 * 7 * 8 * (256 * 2048 + 448 * 512 + 256 * 6144)
    assert plan["dop_frees_bytes_per_rank_over_dp"] / GIB == pytest.approx(9.46, abs=0.005)


def test_primitives_of_the_papers_directions(capsys: pytest.CaptureFixture[str]) -> None:
    switches = plan_json(capsys, "hardware=h200")["switches"]
    assert len(switches) == 20
    directions = [f"{src}->{dst}" for src, dst in itertools.permutations(PAPER, 2)]
    kv = Counter(switches[name]["kv"] for name in directions)
    weights = Counter(switches[name]["weights"] for name in directions)
    assert kv["all_gather"] == 3 and kv["all_to_all"] == 4 and kv["discard"] + kv["none"] == 5
    assert weights["all_gather"] == 4
    for name, switch in switches.items():
        assert bool(switch["kv_bytes_per_token"]) == (switch["kv"] in ("all_gather", "all_to_all")), name
        assert bool(switch["weight_bytes_per_rank"]) == (switch["weights"] == "all_gather"), name


def test_received_kv_is_a_share_of_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    switches = plan_json(capsys, "hardware=h200", "ranks=8")["switches"]
    assert switches["dp->tp"]["kv_bytes_per_token"] == 1152 * 7 // 8
    assert switches["dp->cp"]["kv_bytes_per_token"] == 1152 * 7 // 64


def test_layouts_that_cannot_shard_are_null_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "model=glm_4_7_flash", "hardware=h200", "ranks=8")
    assert {name for name, layout in plan["layouts"].items() if layout is None} == {"tp", "dop", "dcp"}
    assert "8 ranks do not divide 20 heads" in plan["refused"]["dop"]
    assert plan["dop_frees_bytes_per_rank_over_dp"] is None
    assert {name for name, switch in plan["switches"].items() if switch is not None} == {"dp->cp", "cp->dp"}


@pytest.mark.parametrize("model", ["minicpm3", "youtu", "glm_4_7_flash"])
def test_longer_contexts_need_fewer_requests(capsys: pytest.CaptureFixture[str], model: str) -> None:
    few = plan_json(capsys, f"model={model}", "hardware=h200", "ranks=4", "batch=4")
    many = plan_json(capsys, f"model={model}", "hardware=h200", "ranks=4", "batch=64")
    for name in LAYOUTS:
        assert few["layouts"][name]["longest_context"] > many["layouts"][name]["longest_context"] > 0
        assert few["layouts"][name]["kv_tokens"] == many["layouts"][name]["kv_tokens"]


def test_memory_adds_up_and_bounds_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, "model=glm_4_7_flash", "hardware=h200", "ranks=4", "mem_fraction=0.5")
    memory = plan["memory_bytes_per_rank"]
    parts = sum(size for name, size in memory.items() if name not in ("usable", "attention_and_kv"))
    assert memory["usable"] == int(139 * 0.5 * GIB) and memory["usable"] - parts == memory["attention_and_kv"]
    layer_bytes = 3 * 2048 * 1536 * 2  # one expert in bfloat16
    assert memory["experts"] == 46 * 16 * layer_bytes
    slot = plan["page_size"] * plan["kv_bytes_per_token_per_layer"] * plan["num_layers"]
    for layout in plan["layouts"].values():
        assert layout["attention_bytes_per_rank"] + layout["page_slots_per_rank"] * slot <= memory["attention_and_kv"]


@pytest.mark.parametrize("model", options("model"))
@pytest.mark.parametrize("hardware", options("hardware"))
def test_every_model_and_hardware_file_plans(capsys: pytest.CaptureFixture[str], model: str, hardware: str) -> None:
    if model == "scribe" and not (ROOT / "splash" / "data" / "scribe" / "config.json").exists():
        assert "no such directory" in refused(capsys, "model=scribe", f"hardware={hardware}")
        return
    assert main([f"model={model}", f"hardware={hardware}", "ranks=4"]) == 0
    assert "What fits" in capsys.readouterr().out


def test_hardware_files_are_named_for_what_they_describe() -> None:
    for name in options("hardware"):
        hardware = build(Hardware, compose("plan", [f"+hardware={name}"])["hardware"])
        assert hardware.name == name


def test_models_that_can_be_served_are_those_the_reader_serves() -> None:
    for name in options("model"):
        config = compose("plan", [f"model={name}"])["model"]["config"]
        if config is None:
            continue
        parsed = parse_model_config(config, name)
        if parsed.spec.architecture in SERVABLE:
            check_servable(parsed)


def test_a_checkpoint_path_takes_the_place_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose("plan", ["model=youtu"])["model"]["config"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    plan = plan_json(capsys, "model=youtu", f"model.path={tmp_path}", "hardware=h200", "ranks=2")
    assert plan["num_layers"] == 5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["hardware", "b200, cpu, dcu, h200"]),
        (["hardware=h300"], ["hardware", "h300", "h200"]),
        (["model=gpt", "hardware=h200"], ["model", "gpt", "deepseek_v3"]),
        (["hardware=h200", "rank=8"], ["rank:", "did you mean ranks"]),
        (["hardware=h200", "+colour=red"], ["colour", "unknown option"]),
        (["hardware=h200", "+hardware.colour=red"], ["hardware.colour", "unknown option"]),
        (["hardware=h200", "hardware.memory_gib=lots"], ["hardware.memory_gib", "a number", "lots"]),
        (["hardware=h200", "ranks=0"], ["ranks", "between 1 and 128", "0"]),
        (["hardware=h200", "ranks=eight"], ["ranks", "an integer", "eight"]),
        (["hardware=h200", "batch=0"], ["batch", "0"]),
        (["hardware=h200", "page_size=48"], ["page_size", "power of two", "48"]),
        (["hardware=h200", "mem_fraction=1.5"], ["mem_fraction", "1.5"]),
        (["hardware=h200", "dtype=int4"], ["dtype", "bfloat16, fp8", "int4"]),
        (["hardware=h200", "format=yaml"], ["format", "table, json", "yaml"]),
        (["hardware=h200", "model.path=/nowhere"], ["/nowhere", "no such directory"]),
        (["hardware=h200", "model.config=null"], ["model.path", "neither a path nor a config"]),
        (["hardware=h200", "model.config.kv_lora_rank=null"], ["kv_lora_rank", "missing"]),
        (["--verbose"], ["--verbose", "--help"]),
    ],
)
def test_what_cannot_work_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], expected: list[str]
) -> None:
    message = refused(capsys, *arguments)
    assert all(part in message for part in expected), message


def test_help_lists_options_and_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("ranks:", "mem_fraction:", "hardware=b200|cpu|dcu|h200", "deepseek_v3"))


def test_the_command_needs_no_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import sys; from splash.plan import main; status = main(); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "model=deepseek_v3", "+hardware=h200", "ranks=8", "format=json"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["attention_bytes_per_layer"] == 328 * MIB
    assert done.stderr == "" and not list(tmp_path.iterdir())


def test_plans_are_computed_from_settings_alone() -> None:
    settings = build(PlanSettings, compose("plan", ["hardware=dcu", "model=youtu"]))
    plan = make_plan(settings)
    assert plan.geometry.ranks == settings.hardware.ranks == 8
    assert plan.capacities["dop"].kv_tokens > plan.capacities["dp"].kv_tokens
