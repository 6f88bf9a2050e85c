"""What all tests share: shapes checked at run time, one cache folder, skips that fail on demand."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from importlib.metadata import version

import pytest

# Before JAX starts: the checks that need several devices make them of this machine's cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all programs here run a few times only: without LLVM's last effort, and with fusions that
# are emitted as one loop each, compiling takes a third of the time. JAX 0.12 has no such choice
# any more, and ends where it is told of it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

# Where every operation was traced is asked by nobody here.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

from jaxtyping import install_import_hook

install_import_hook(["posenc", "eval"], "typechecker.check")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped test is a failure")


# Files whose tests share nothing: each goes wherever there is room, at the end.
ALONE = {"test_conformance.py"}
# Files with the longest tests: begun at the end, one would leave the other cores idle.
LONG = ["test_sweep.py", "test_documents.py", "test_train.py", "test_audit.py"]


@pytest.hookimpl(hookwrapper=True)  # before the groups of tests are read
def pytest_collection_modifyitems(items: list[pytest.Item]):
    # What is made for several tests, and compiled by them, is made in one worker: the tests of a
    # file run in one, or those of one definition.
    for item in items:
        if any(item.iter_markers("xdist_group")) or item.path.name in ALONE:
            continue
        params = getattr(getattr(item, "callspec", None), "params", {})
        own = f" {params['entry']}" if "entry" in params else ""
        item.add_marker(pytest.mark.xdist_group(item.path.name + own))
    items.sort(key=lambda item: (item.path.name not in LONG) + (item.path.name in ALONE))
    yield


def pytest_configure(config: pytest.Config) -> None:
    # Text that is extracted and programs that are compiled go to a folder of this run's own, which
    # its worker processes share. Set here, before they start.
    if "POSENC_CACHE" not in os.environ:
        os.environ["POSENC_CACHE"] = config.posenc_cache = tempfile.mkdtemp(prefix="posenc-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(getattr(config, "posenc_cache", ""), ignore_errors=True)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--fail-on-skip"):
        report.outcome = "failed"
        report.longrepr = f"skipped, where a skip is a failure: {report.longrepr}"


@pytest.fixture(autouse=True, scope="module")
def _little_is_carried_from_file_to_file():
    """Let go of compiled programs, and of the cache on disk that commands turn on.

    What is left is not looked through for garbage again, which took a sixth of the time.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    gc.freeze()
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.clear_caches()
    if jax.config.jax_compilation_cache_dir != before:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def common(tmp_path_factory):
    """Options of a run of six steps, on a little text, that `train.Arguments` takes."""
    import numpy as np

    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for index in range(160):
        (folder / f"{index}.txt").write_text(" ".join(rng.choice(["aa", "b", "cccc"], 40)))
    return {
        **{"encoding": ("wpe",), "model": "nano", "data": str(folder / "*.txt")},
        **{"train_length": 16, "batch_size": 4, "warmup_steps": 2, "steps": 6},
        **{"eval_every": 3, "checkpoint_every": 3, "eval_tokens": 64},
    }
