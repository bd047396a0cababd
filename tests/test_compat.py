"""A jax newer than what was tested gives a warning and no more."""

import warnings

import jax
import pytest

from moonep_jax._compat import TESTED, warn_if_untested


@pytest.mark.parametrize("version", [*TESTED, (*TESTED[1], 1), (0, 11, 2)])
def test_tested_versions_are_silent(version: tuple[int, ...]) -> None:
    warn_if_untested(version)


@pytest.mark.parametrize("version", [(0, 12, 1), (0, 13, 0), (1, 0, 0)])
def test_a_newer_one_warns(version: tuple[int, ...]) -> None:
    got = ".".join(map(str, version))
    with pytest.warns(UserWarning, match=f"^moonep_jax is tested with jax 0.10.2 to .*, and this is {got}; use jax"):
        warn_if_untested(version)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="moonep_jax is tested with")
        warn_if_untested(version)


def test_the_oldest_is_what_the_package_asks_for() -> None:
    assert jax.__version_info__ >= TESTED[0]
