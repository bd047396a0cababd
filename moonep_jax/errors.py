"""Exceptions of the library and the one format of their texts. Imports nothing but the standard library."""

from __future__ import annotations


class MoonEPError(RuntimeError):
    """Base of every error that this library raises on purpose."""


class SetupError(MoonEPError):
    """Setting a domain up failed. Every process of the mesh raises it with the same text."""


class ConfigError(MoonEPError, ValueError):
    """A value given by the caller (a config field, a mesh, an environment variable) cannot be used."""


class OpError(MoonEPError, ValueError):
    """An op was called in a way that cannot work; raised while tracing."""


class DomainError(MoonEPError):
    """A domain is closed, or in error because a call failed on some rank."""


def message(op: str, wrong: str, got: object, expected: object, fix: str) -> str:
    """The text of an error: `op: what is wrong; got X, expected Y; how to fix`."""
    return f"{op}: {wrong}; got {got}, expected {expected}; {fix}"
