"""The ways to draw in-edges, by the name that flags and arguments give them; needs no torch."""

from __future__ import annotations

from tgnn.errors import wrong

SAMPLERS = ("uniform", "labor", "labor-dependent", "weighted")


def check_sampler(sampler: str, replace: bool, has_weights: bool = True) -> None:
    """UserError for an unknown sampler, LABOR with replacement, or weighted sampling of a graph without weights."""
    if sampler not in SAMPLERS:
        raise wrong("--sampler", repr(sampler), f"one of {', '.join(SAMPLERS)}", "choose one of these")
    if replace and uses_sources(sampler):
        expected = "a sampler that draws a fixed number of in-edges"
        do = "leave --replace out, or use --sampler uniform or weighted"
        raise wrong("--replace", f"--sampler {sampler} with it", expected, do)
    if sampler == "weighted" and not has_weights:
        do = "use another sampler, or give the data's edges weights"
        raise wrong("--sampler weighted", "data without edge weights", "a weight per edge", do)


def uses_sources(sampler: str) -> bool:
    """Whether a sampler keys its choice by the sources' original ids."""
    return sampler in ("labor", "labor-dependent")
