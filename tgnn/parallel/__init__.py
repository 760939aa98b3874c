"""Ranks: processes that own one part each, the collectives between them, how they are started and ended."""

from tgnn.parallel.comm import Comm, CommError, current, initialise, initialise_from_env, shutdown
from tgnn.parallel.exchange import ExchangePlan, Halo, all_reduce_gradients, start_exchange
from tgnn.parallel.launch import RankError, default_ranks, launch

__all__ = [
    "Comm",
    "CommError",
    "ExchangePlan",
    "Halo",
    "RankError",
    "all_reduce_gradients",
    "current",
    "default_ranks",
    "initialise",
    "initialise_from_env",
    "launch",
    "shutdown",
    "start_exchange",
]
