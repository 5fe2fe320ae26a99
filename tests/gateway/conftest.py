"""A fake verifier, listening."""

from __future__ import annotations

from tests.support.fake_verifier import verifier

__all__ = ["verifier"]
