"""Rules that matter are tests: what may be imported, what may be written, how long a file may be."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "splash"
MAX_LINES = 500
SOURCES = sorted(PACKAGE.rglob("*.py"))
IMPORT_NAMES = {"hydra-core": {"hydra", "omegaconf"}, "nvidia-ml-py": {"pynvml"}, "flashinfer-python": {"flashinfer"}}
IMPORT_NAMES |= {"amd-aiter": {"aiter"}, "prometheus-client": {"prometheus_client"}}
IMPORT_NAMES |= {"opentelemetry-sdk": {"opentelemetry"}}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
UNSAFE = re.compile(r"\b(pickle|torch\.load|trust_remote_code)\b|(?<![\w.])(eval|exec)\(")


def tracked_python_files() -> list[Path]:
    """Python files that git tracks or would track; all of them where this is not a git checkout."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listing = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        return [path for folder in ("splash", "tests", "perf", "training") for path in (ROOT / folder).rglob("*.py")]
    return [path for line in listing.stdout.splitlines() if (path := ROOT / line).is_file()]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def module_names(folder: str) -> list[str]:
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    assert names, f"splash/{folder} has no modules"
    return names


def third_party_imports(path: Path) -> set[str]:
    """Top-level names imported anywhere in `path` that are neither SPLASH's nor the standard library's."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"splash"}


def test_files_are_short_enough_to_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in tracked_python_files()}
    assert len(lengths) > 10
    assert not {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_LINES}


def test_importing_splash_loads_nothing_heavy() -> None:
    assert not loaded_by("import splash") & {"torch", "numpy", "msgspec", "hydra", "fastapi"}


@pytest.mark.parametrize("folder", ["core", "scheduler"])
def test_the_algebra_and_the_scheduler_never_load_torch(folder: str) -> None:
    assert "torch" not in loaded_by("import " + ", ".join(module_names(folder)))


@pytest.mark.parametrize("name", ["LLM", "SamplingParams", "__version__"])
def test_exported_names_resolve(name: str) -> None:
    splash = importlib.import_module("splash")
    assert name in splash.__all__
    assert getattr(splash, name) is not None


def test_all_lists_every_export_and_unknown_names_are_refused() -> None:
    splash = importlib.import_module("splash")
    assert set(splash.__all__) == {"LLM", "SamplingParams", "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        _ = splash.NoSuchName


@pytest.mark.parametrize("pattern", [UNFINISHED, UNSAFE], ids=["unfinished", "unsafe"])
def test_sources_are_finished_and_run_nobody_elses_code(pattern: re.Pattern[str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + extras["cuda"] + extras["rocm"] + extras["otlp"]
    distributions = {re.split(r"[\s<>=!~;\[]", requirement)[0] for requirement in requirements}
    declared = set().union(*(IMPORT_NAMES.get(name, {name}) for name in distributions))
    found = {f"{path.relative_to(ROOT)}: {name}" for path in SOURCES for name in third_party_imports(path) - declared}
    assert not found
