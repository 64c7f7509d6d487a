"""Imports point down only, and packages export little."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_import_linter_contracts_hold():
    # In a process of its own: the linter configures logging, which would silence the loggers of other tests.
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_package_exports_more_than_eight_names():
    import importlib
    import pkgutil

    for name in ("laminar", "relay", "rollout", "trainer"):
        package = importlib.import_module(name)
        for module in [
            package,
            *(importlib.import_module(m.name) for m in pkgutil.iter_modules(package.__path__, name + ".") if m.ispkg),
        ]:
            public = [n for n in getattr(module, "__all__", vars(module)) if not n.startswith("_")]
            submodules = {m.name.rpartition(".")[2] for m in pkgutil.iter_modules(module.__path__)}
            assert len(set(public) - submodules) <= 8, module.__name__
