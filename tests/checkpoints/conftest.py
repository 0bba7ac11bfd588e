"""Shared by the tests of checkpoints: no network, as those of models."""

from models.conftest import _no_network  # noqa: F401 - a fixture
