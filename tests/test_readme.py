"""What the documents say is true: their code runs, their commands exist, their links lead somewhere, and imports go down."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from proteus_lm.cli import main

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "proteus_lm"
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", path.read_text(encoding="utf-8"))


PYTHON = [pytest.param(code, id=f"{path.name}-{i}") for path in DOCUMENTS for i, code in enumerate(blocks(path, "python"))]
SHELL = [line for path in DOCUMENTS for block in blocks(path, "bash") for line in block.splitlines()]
COMMANDS = sorted({part.split("#")[0].strip() for line in SHELL for part in line.split("&&") if part.split("#")[0].strip()})


def test_there_are_documents_with_code_to_check():
    assert len(PYTHON) >= 2
    assert {"make demo", "make test"} <= set(COMMANDS)


@pytest.mark.parametrize("code", PYTHON)
def test_python_in_the_documents_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "document", "exec"), {"__name__": "document"})


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_in_the_documents_exist(command):
    targets = set(re.findall(r"(?m)^([a-z]+):", (ROOT / "Makefile").read_text()))
    assert set(shlex.split(command)[1:]) <= targets


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("proteus ")])
def test_commands_in_the_documents_are_understood(command, monkeypatch):
    """The recipe is read and every option parsed; only the work itself is left out."""
    from types import SimpleNamespace

    done = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("proteus_lm.data.prepare.prepare", lambda *a, **k: done.append(a) or SimpleNamespace(splits={}))
    monkeypatch.setattr("proteus_lm.train.loop.train", lambda *a, **k: done.append(a) or SimpleNamespace(path="", steps=[]))
    monkeypatch.setattr(
        "proteus_lm.evals.evaluate", lambda *a, **k: pytest.fail("documents show no evaluation of a run that is there")
    )
    assert main(shlex.split(command)[1:]) == 0
    assert len(done) == 1


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(("make ", "proteus "))])
def test_other_commands_in_the_documents_are_files_here_or_made_by_setup(command):
    program = shlex.split(command)[0]
    assert program.startswith(".venv/bin/") or (ROOT / program).is_file(), program


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_to_files(path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    for link in links:
        if not re.match(r"[a-z]+://", link):
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


def named_objects() -> list[tuple[str, str]]:
    """`proteus_lm.x.y` and `ops.y` in the tables of the paper-to-code page."""
    text = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    found = re.findall(r"`(?:proteus_lm\.)?((?:ops|optim)(?:\.\w+)+)`", text)
    return sorted({tuple(name.rsplit(".", 1)) for name in found})


@pytest.mark.parametrize(("module", "name"), named_objects())
def test_objects_in_the_paper_to_code_page_exist(module, name):
    import importlib

    assert hasattr(importlib.import_module(f"proteus_lm.{module}"), name)


def test_fields_in_the_choices_page_are_fields_of_the_configuration():
    import dataclasses

    from proteus_lm import ProteusConfig

    fields = {field.name for field in dataclasses.fields(ProteusConfig)}
    rows = [line for line in (ROOT / "docs" / "choices.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)(?:: [^`]*)?`", re.split(r"(?<!\\)\|", row)[3])}
    assert {"memory_axis", "norm_order", "read", "positions"} <= named
    assert named - {"scale"} <= fields  # `scale` is an argument of the operations


def test_the_readme_and_the_state_page_name_every_mixer_and_no_other():
    from proteus_lm.mixers import registry

    (row,) = re.findall(r"(?m)^\| `mixer: \.\.\.` \|(.*)$", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", row)) == set(registry)
    table = (ROOT / "docs" / "state.md").read_text(encoding="utf-8").split("| mixer |")[1].split("\n\n")[0]
    assert {
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    } == set(registry)


# The import rule.


def rooms() -> list[list[str]]:
    """The lines of the README's map, from the ground up: names of modules and packages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Map of the code")[1]
    lines = re.findall(r"(?m)^  (\S+(?:, \S+)*) {2,}\S", text.split("```")[1])
    return [[name.removesuffix(".py").rstrip("/") for name in line.split(", ")] for line in lines]


def room_of(module: str) -> str | None:
    """First part below the package of `proteus_lm.a.b`: `a`; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import from our package, those inside functions too; those for type checkers only never run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "proteus_lm" else [node.module or ""]
        else:
            continue
        found += [(node.lineno, room) for name in names if name.split(".")[0] == "proteus_lm" and (room := room_of(name))]
    return found


def modules() -> list[tuple[str, Path]]:
    """(room, file) of every module of the package but its front, which gathers the public names."""
    files = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]
    return [(path.relative_to(SOURCE).parts[0].removesuffix(".py"), path) for path in files]


def test_every_module_stands_on_the_map_and_every_name_of_the_map_is_there():
    on_map = [name for line in rooms() for name in line]
    assert sorted(set(on_map)) == sorted(on_map)
    assert {room for room, _ in modules()} == set(on_map)


def test_imports_go_down_only():
    level = {name: i for i, line in enumerate(rooms()) for name in line}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {room}, which stands above it"
        for here, path in modules()
        for line, room in imports_of(path)
        if level[room] > level[here]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_longer_than_the_house_allows():
    assert all(len(path.read_text().splitlines()) <= 600 for _, path in modules())
