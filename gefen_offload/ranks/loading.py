"""Finding a worker again in its rank: importing the modules it came from, asserts and all."""

from __future__ import annotations

import ast
import gc
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gefen_offload.ranks.wire import Module


def load_modules(modules: Sequence[Module], verbosity: int) -> None:
    """Make each module importable under the name it has in the parent."""
    for module in modules:
        if module.name in sys.modules and not _is_main(module.name):
            continue
        if module.rewritten or _is_main(module.name) or not _importable(module):
            _load_from_file(module, verbosity)
            gc.freeze()  # modules stay: the collection after the test need not walk them


def _is_main(name: str) -> bool:
    return name == "__main__" and not hasattr(sys.modules.get(name), "_ranks_loaded")


def _importable(module: Module) -> bool:
    """Whether plain import would find this very file."""
    try:
        spec = importlib.util.find_spec(module.name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and os.path.abspath(spec.origin) == module.file


def _load_from_file(module: Module, verbosity: int) -> None:
    """Execute the file as the module `name`; a module that fails is not left behind."""
    spec = importlib.util.spec_from_file_location(module.name, module.file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {module.name} from {module.file}", name=module.name, path=module.file)
    loaded = importlib.util.module_from_spec(spec)
    _make_parents(module)
    before = sys.modules.get(module.name)
    sys.modules[module.name] = loaded
    try:
        if module.rewritten:
            exec(_rewritten(Path(module.file), verbosity), loaded.__dict__)
        elif module.name == "__main__":
            loaded.__dict__.update(__name__="__mp_main__", _ranks_loaded=True)  # so that its last lines do not run
            sys.modules["__mp_main__"] = loaded
            exec(compile(Path(module.file).read_bytes(), module.file, "exec", dont_inherit=True), loaded.__dict__)
        else:
            spec.loader.exec_module(loaded)
    except BaseException:
        if before is None:
            del sys.modules[module.name]
        else:
            sys.modules[module.name] = before
        raise


def _make_parents(module: Module) -> None:
    """Packages above the module that no plain import finds (pytest's importlib mode names them after folders)."""
    parts = module.name.split(".")
    folder = Path(module.file).parent
    for depth in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:depth])
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(folder)]
            sys.modules[name] = package
        folder = folder.parent


def _rewritten(path: Path, verbosity: int) -> Any:
    """The file's code with pytest's assertion introspection."""
    from _pytest.assertion import rewrite, util

    source = path.read_bytes()
    tree = ast.parse(source, filename=str(path))
    rewrite.rewrite_asserts(tree, source, str(path))
    if not isinstance(util._reprcompare, _Explain):
        util._reprcompare = _Explain(verbosity)
    return compile(tree, str(path), "exec", dont_inherit=True)


class _Explain:
    """pytest's comparison of two sides; its configuration is made when the first assertion fails, not before."""

    def __init__(self, verbosity: int) -> None:
        self.verbosity = verbosity
        self._config: Any = None

    def __call__(self, op: str, left: object, right: object) -> str | None:
        from _pytest.assertion import util

        try:
            config = self._made_config()
            util._config = config
            for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
                if lines:
                    return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        except Exception:
            return None  # the plain assertion text is still there
        return None

    def _made_config(self) -> Any:
        if self._config is None:
            from _pytest.config import _prepareconfig

            with _no_foreign_options():
                self._config = _prepareconfig(["-c", os.devnull, "--rootdir", os.sep, *["-v"] * self.verbosity])
        return self._config


@contextmanager
def _no_foreign_options() -> Iterator[None]:
    kept = {name: os.environ.pop(name, None) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    autoload = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in kept.items() if value is not None})
        if autoload is None:
            del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        else:
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = autoload
