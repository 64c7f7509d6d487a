"""Imports point down only, and the config needs no heavy library."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "deepspeed", "ray", "datasets")


def test_import_linter_contracts_hold():
    from importlinter.cli import lint_imports

    assert lint_imports(no_cache=True) == 0


def test_checking_a_config_imports_nothing_heavy():
    code = f"import laminar.config.check, laminar.config.explain, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == "[]"


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
