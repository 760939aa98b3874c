"""Tests of the layers and the stack."""
