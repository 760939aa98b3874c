"""Owners and the three kinds of vertex id."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from tgnn.errors import UserError
from tgnn.partition.ownership import Ownership, ownership_from_assignment


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 40])
def test_every_vertex_is_owned_once_and_ids_round_trip(num_parts: int) -> None:
    part_of = np.random.default_rng(num_parts).integers(0, num_parts, 33)
    ownership, original_of_new, new_of_original = ownership_from_assignment(part_of, num_parts)
    assert ownership.num_parts == num_parts and ownership.num_vertices == 33
    np.testing.assert_array_equal(np.sort(original_of_new), np.arange(33))
    np.testing.assert_array_equal(original_of_new[new_of_original], np.arange(33))
    new = np.arange(33)
    np.testing.assert_array_equal(ownership.owner(new), part_of[original_of_new])
    owned = np.concatenate([np.array(ownership.range(part), dtype=int) for part in range(num_parts)])
    np.testing.assert_array_equal(owned, new)
    np.testing.assert_array_equal(ownership.sizes(), [ownership.size(p) for p in range(num_parts)])
    for part in range(num_parts):
        ids = np.array(ownership.range(part), dtype=int)
        np.testing.assert_array_equal(ownership.local(ids, part), np.arange(len(ids)))
        assert (np.diff(original_of_new[ids]) > 0).all(), "original ids ascend inside a part"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensors_answer_like_arrays(dtype: torch.dtype) -> None:
    ownership = Ownership([0, 3, 3, 7, 7])
    new = np.array([[6, 0, 2], [3, 5, 2]])
    ids = torch.tensor(new, dtype=dtype)
    owner = ownership.owner(ids)
    np.testing.assert_array_equal(owner.numpy(), ownership.owner(new))
    np.testing.assert_array_equal(ownership.owner(ids.T).numpy(), ownership.owner(new.T))
    for part in (2, owner):
        local = ownership.local(ids, part)
        assert local.dtype == torch.int64
        np.testing.assert_array_equal(local.numpy(), ownership.local(new, np.asarray(part)))
    assert ownership.owner(torch.zeros(0, dtype=dtype)).shape == (0,)


def test_empty_parts_own_nothing() -> None:
    ownership = Ownership([0, 0, 2, 2, 3, 3])
    np.testing.assert_array_equal(ownership.owner(np.arange(3)), [1, 1, 3])
    assert [len(ownership.range(part)) for part in range(5)] == [0, 2, 0, 1, 0]


def test_compares_and_pickles_by_its_offsets() -> None:
    ownership = Ownership([0, 3, 7])
    ownership.owner(torch.arange(3))
    assert pickle.loads(pickle.dumps(ownership)) == ownership != Ownership([0, 4, 7])
    assert len({ownership, Ownership(np.array([0, 3, 7]))}) == 1


@pytest.mark.parametrize("offsets", [[], [0], [1, 2], [0, 3, 2], [[0, 1]]])
def test_offsets_that_are_none_are_refused(offsets: list) -> None:
    with pytest.raises(UserError, match="offsets"):
        Ownership(offsets)


@pytest.mark.parametrize("part_of", [[0, -1], [0, 2], [0.5, 1.0], [[0, 1]]])
def test_assignments_that_are_none_are_refused(part_of: list) -> None:
    with pytest.raises(UserError, match="assignment"):
        ownership_from_assignment(np.array(part_of), 2)


def test_no_vertices_at_all() -> None:
    ownership, original_of_new, new_of_original = ownership_from_assignment(np.zeros(0, np.int32), 3)
    assert ownership == Ownership([0, 0, 0, 0])
    assert len(original_of_new) == len(new_of_original) == 0


def test_hotness_orders_the_vertices_inside_their_parts() -> None:
    """Equal hotness: ascending original id."""
    hotness = np.array([0.5, 2.0, 0.5, 3.0, 0.0])
    ownership, original_of_new, new_of_original = ownership_from_assignment(
        np.array([1, 0, 1, 0, 1]), hotness=hotness
    )
    assert ownership == Ownership([0, 2, 5])
    assert original_of_new.tolist() == [3, 1, 0, 2, 4]
    np.testing.assert_array_equal(new_of_original[original_of_new], np.arange(5))
