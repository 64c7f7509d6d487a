"""Stands in for SGLang's compiled kernels, which need AVX-512 or a GPU: everything can be imported, nothing can be called.

SGLang imports names from `sgl_kernel` even where the model at hand never calls them (Llama with the `torch_native`
attention on a CPU calls none). Every attribute and submodule resolves to an object that raises when it is called.
`make sglang-cpu` copies this package into SGLang's environment.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__version__ = "0.0.0+stub"


class MissingKernel:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: object, **keywords: object) -> object:
        """Say which kernel was wanted.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{self.__name__} is a stub: this model needs SGLang's compiled kernels (make sglang, on a GPU)"
        )

    def __getattr__(self, name: str) -> "MissingKernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class StubModule(ModuleType):
    """A module in which every public name is a missing kernel."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule of this package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for `sgl_kernel.*`, nothing for others."""
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty stub."""
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def __getattr__(name: str) -> MissingKernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return MissingKernel(f"{__name__}.{name}")


sys.meta_path.append(StubFinder())
