"""Stand-ins with which SGLang's Python can be imported on a CPU, without its kernels.

A stand-in for a package has every name: modules in lower case, classes in upper case. Decorators of
kernels return the function as it is.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = (
    "triton",
    "IPython",
    "aiohttp",
    "torchvision",
    "tvm_ffi",
    "sentencepiece",
    "compressed_tensors",
    "uvloop",
    "sgl_kernel",
    "httpx",
)


class AnyMember(type):
    """The type of classes that have every member, as enumerations need."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class AnyClass(metaclass=AnyMember):
    def __init__(self, *_args: Any, **_options: Any):
        pass

    def __init_subclass__(cls, **_options: Any):
        super().__init_subclass__()


class AnyModule(types.ModuleType):
    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any
        if name[:1].isupper():
            made = AnyMember(name, (AnyClass,), {"__module__": self.__name__})
        else:
            made = AnyModule(f"{self.__name__}.{name}")
            sys.modules.setdefault(made.__name__, made)
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Stand for @triton.jit and @triton.jit(...)."""
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return lambda function: function


class Finder:
    """Finds the modules of PACKAGES."""

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> Any:
        if name.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)  # type: ignore[arg-type]
        return None


class Loader:
    def create_module(self, spec: Any) -> Any:
        return sys.modules.get(spec.name) or AnyModule(spec.name)

    def exec_module(self, _module: Any) -> None:
        pass


def install(folders: Sequence[str]) -> None:
    """Let SGLang be imported from `folders`."""
    # transformers looks for torchvision once, and must not find the stand-in
    import transformers.image_utils
    import transformers.utils

    assert transformers.utils and transformers.image_utils
    sys.path[:0] = folders
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    import triton
    import triton.backends
    import triton.language

    triton.__version__ = "3.6.0"
    triton.cdiv = lambda a, b: -(a // -b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
    triton.backends.backends = {}
    triton.language.constexpr = AnyMember("constexpr", (AnyClass,), {})
    triton.language.dtype = AnyMember("dtype", (AnyClass,), {})
