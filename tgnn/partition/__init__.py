"""Partitions: who owns a vertex, how the parts are chosen, and the store they are kept in."""

from tgnn.partition.assign import assign
from tgnn.partition.hotness import Hotness
from tgnn.partition.ownership import Ownership, ownership_from_assignment
from tgnn.partition.report import format_report, report
from tgnn.partition.store import FORMAT_VERSION, Part, Store, write_store

__all__ = [
    "FORMAT_VERSION",
    "Hotness",
    "Ownership",
    "Part",
    "Store",
    "assign",
    "format_report",
    "ownership_from_assignment",
    "report",
    "write_store",
]
