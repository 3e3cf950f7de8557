"""What is said about versions of the hosts that are too old or not known yet."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest

from deepspeed_partition import versions
from deepspeed_partition.versions import RANGES, check_versions

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def installed(monkeypatch):
    def set_version(version):
        monkeypatch.setattr(metadata, "version", lambda package: version)

    return set_version


def requirements_of(extra):
    """The requirements of an extra and of the extras that it names: lower ends by package."""
    ends = {}
    for requirement in PROJECT["optional-dependencies"][extra]:
        if named := re.fullmatch(r"madpipe\[([\w,]+)\]", requirement):
            for other in named[1].split(","):
                ends |= requirements_of(other)
        else:
            package, _, oldest = requirement.partition(">=")
            ends[package] = oldest
    return ends


def test_the_extras_bring_the_hosts_from_their_lower_ends_on():
    assert requirements_of("deepspeed") == {package: RANGES[package].oldest for package in ("torch", "deepspeed")}
    ends = requirements_of("lightning")
    assert ends == {package: RANGES[package].oldest for package in ("torch", "deepspeed", "pytorch-lightning")}
    assert ends.items() <= requirements_of("test").items()


def test_who_only_plans_gets_no_host():
    base = {re.split("[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert base == {"click", "highspy", "numpy", "pulp", "rich", "tqdm"}


def test_the_script_builds_both_ends():
    script = (ROOT / ".ci" / "versions").read_text()
    for package, supported in RANGES.items():
        assert f"{package}=={supported.oldest} " in script
        assert re.search(f'{package}=={re.escape(supported.newest_tested)}[ "]', script)


@pytest.mark.parametrize("version", ["0.18.9", "0.9", "0.18.99+cu12"])
def test_older_ones_are_refused(installed, version):
    installed(version)
    with pytest.raises(ImportError) as caught:
        check_versions("deepspeed")
    oldest = RANGES["deepspeed"].oldest
    for words in (version, oldest, f"pip install 'deepspeed>={oldest}'"):
        assert words in str(caught.value)


@pytest.mark.parametrize("version", [RANGES["deepspeed"].oldest, RANGES["deepspeed"].newest_tested, "0.19.8+abc"])
def test_both_ends_are_silent(installed, version):
    installed(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_versions("deepspeed")


@pytest.mark.parametrize("version", ["0.19.10", "0.20", "1.0.0.dev3"])
def test_newer_ones_are_tried_with_a_warning(installed, version):
    installed(version)
    with pytest.warns(RuntimeWarning, match=f"deepspeed {version} is newer than MadPipe was tested with"):
        check_versions("deepspeed")


def test_what_is_not_installed_is_passed_over(monkeypatch):
    monkeypatch.setitem(RANGES, "no-such-package", versions.Range("1", "2"))
    check_versions("no-such-package")


WITHOUT = """
import importlib.util
absent = {absent!r}
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in absent else find_spec(name, package)
try:
    {statement}
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("statement", "absent", "said"),
    [
        (
            "import deepspeed_partition; deepspeed_partition.install()", ["deepspeed"],
            "HostError the DeepSpeed engine of MadPipe needs deepspeed, which is not installed: "
            "pip install 'madpipe[deepspeed]'",
        ),
        (
            "import lightning_madpipe", ["pytorch_lightning", "lightning"],
            "HostError lightning_madpipe needs PyTorch Lightning, which is not installed: "
            "pip install 'madpipe[lightning]'",
        ),
        (
            "import lightning_madpipe", ["deepspeed"],
            "HostError lightning_madpipe needs deepspeed, which is not installed: "
            "pip install 'madpipe[lightning]'",
        ),
        (
            "import deepspeed_partition.profiling", ["torch"],
            "HostError measuring layers needs torch, which is not installed: pip install 'madpipe[deepspeed]'",
        ),
    ],
    ids=["DeepSpeed for its engine", "Lightning", "DeepSpeed for Lightning", "torch for a profile"],
)  # fmt: skip
def test_a_missing_package_is_named_with_what_brings_it(statement, absent, said):
    program = WITHOUT.format(absent=absent, statement=statement)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == said, done.stderr[-2000:]


@pytest.mark.parametrize("host", ["deepspeed_partition.engine", "lightning_madpipe"])
def test_hosts_check_when_they_are_imported(host):
    program = (
        "from importlib import metadata; metadata.version = lambda package: '0.1'\n"
        f"try:\n    import {host}\nexcept ImportError as error:\n    print('REFUSED', error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "REFUSED MadPipe works with torch" in done.stdout, done.stderr[-2000:]
