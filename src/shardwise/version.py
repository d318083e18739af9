"""The version, where everything else can import it."""

__version__ = "0.1.0"
