"""The library's version, in one place for the package and for the handshake."""

__version__ = "0.1.0"
