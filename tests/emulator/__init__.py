"""Runs the PTX of a Hopper kernel on a CPU; `README.md` says what it models and how a test uses it."""

from .launch import emulate

__all__ = ["emulate"]
