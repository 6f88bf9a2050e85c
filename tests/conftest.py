"""What all tests share: shapes checked at run time, one cache folder, skips that fail on demand."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest

# Before JAX starts: the checks that need several devices make them of this machine's cores.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nearly all programs here run a few times only: without LLVM's last effort the suite takes two
# thirds of the time.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from jaxtyping import install_import_hook

install_import_hook(["posenc", "eval"], "typechecker.check")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fail-on-skip", action="store_true", help="a skipped test is a failure")


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
