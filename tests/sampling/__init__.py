"""Tests of mini-batch sampling on one rank."""
