"""Collectives and the exchange on several ranks, against what one process computes on the whole table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.dist.ranks import run_ranks, same
from tgnn.parallel import Comm, ExchangePlan, all_reduce_gradients, current, start_exchange

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.fixture(scope="module")
def on_three_ranks() -> dict:
    """Everything that is checked on three ranks, in one start; what rank 0 found."""
    return run_ranks(check_three_ranks, 3)


def check_three_ranks() -> dict:
    check_collectives()
    return check_exchange()


def test_collectives_and_exchange_equal_one_process(on_three_ranks: dict):
    """The ranks compare every value themselves and raise; here only that they got to the end."""
    assert on_three_ranks["halo_rows"] == 6 + 2


def check_collectives() -> None:
    comm = current()
    assert (comm.ranks, comm.backend, comm.device) == (3, "gloo", torch.device("cpu"))
    check_rows_round_trip(comm)
    check_bytes_sent(comm)
    check_reductions(comm)
    check_gradients(comm)
    assert comm.all_gather_ints([comm.rank, 7]) == [[0, 7], [1, 7], [2, 7]]
    assert comm.all_gather_ints([]) == [[], [], []]


def check_rows_round_trip(comm: Comm) -> None:
    """Rank r sends (r + 2 q) % 3 rows with value 10 r + q to rank q, so some pairs exchange nothing."""
    shapes = [(), (1,), (5,), (2, 3), (0,), (2, 0)]
    counts = [(comm.rank + 2 * q) % 3 for q in range(3)]
    receive = comm.all_to_all_counts(counts)
    assert receive == [(q + 2 * comm.rank) % 3 for q in range(3)]
    for dtype, shape in [(dtype, (3,)) for dtype in DTYPES] + [(torch.float16, shape) for shape in shapes]:
        wide = [torch.full((n, *shape, 2), 10 * comm.rank + q).to(dtype) for q, n in enumerate(counts)]
        strided = torch.cat(wide)[..., 1]
        arriving = comm.start_all_to_all_rows(strided, counts, receive)
        for received in (comm.all_to_all_rows(strided, counts, receive), arriving.wait()):
            parts = [torch.full((n, *shape), 10 * q + comm.rank).to(dtype) for q, n in enumerate(receive)]
            same(received, torch.cat(parts))
        rows, came = comm.all_to_all_lists(strided, counts)
        assert came == receive
        same(rows, torch.cat(parts))
    nothing = comm.all_to_all_rows(torch.empty(0, 4), [0, 0, 0], [0, 0, 0])
    assert nothing.shape == (0, 4)


def check_bytes_sent(comm: Comm) -> None:
    """Rows to oneself and counts are free: 2 other ranks x 3 rows x 4 columns x 2 bytes."""
    before = comm.bytes_sent
    comm.all_to_all_rows(
        torch.zeros(9, 4, dtype=torch.bfloat16), [3, 3, 3], comm.all_to_all_counts([3, 3, 3])
    )
    assert comm.bytes_sent - before == 2 * 3 * 4 * 2


def check_reductions(comm: Comm) -> None:
    for dtype in DTYPES:
        total = torch.tensor([[1, 0], [comm.rank, 1]]).to(dtype).t()
        assert comm.all_reduce(total) is total
        same(total, torch.tensor([[3, 3], [0, 3]]).to(dtype))
    same(comm.all_reduce(torch.tensor(float(comm.rank)), "max"), torch.tensor(2.0))
    same(comm.all_reduce(torch.tensor([-comm.rank]), "min"), torch.tensor([-2]))
    # 256 + 1 + 1 in bfloat16 would stop at 256; summed in float32 and rounded once it is 258.
    half = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
    same(comm.all_reduce(half), torch.tensor([258.0], dtype=torch.bfloat16))
    assert comm.all_reduce(torch.empty(0)).shape == (0,)
    for dtype in DTYPES:
        table = torch.full((3, 2), comm.rank).to(dtype).t()
        same(comm.broadcast(table, source=2), torch.full((2, 3), 2).to(dtype))
    same(comm.broadcast(torch.tensor(comm.rank), source=1), torch.tensor(1))
    comm.barrier()


def check_gradients(comm: Comm) -> None:
    """Rank 2 has no gradient at all; a frozen parameter is left alone; the extra numbers travel along."""
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    )
    model.append(nn.Parameter(torch.zeros(2), requires_grad=False))
    model.append(nn.Parameter(torch.zeros(0)))
    if comm.rank < 2:
        model[0].grad = torch.full((3, 2), 1.0 + comm.rank).t()
        model[1].grad = torch.full((1,), 0.5, dtype=torch.float64).expand(4).clone()
    extra = torch.tensor([comm.rank, 1.0], dtype=torch.float64)
    same(all_reduce_gradients(model, comm, extra=extra), torch.tensor([3.0, 3.0], dtype=torch.float64))
    same(extra, torch.tensor([comm.rank, 1.0], dtype=torch.float64))
    same(model[0].grad, torch.full((2, 3), 3.0))
    same(model[1].grad, torch.full((4,), 1.0, dtype=torch.float64))
    assert model[2].grad is None and model[3].grad.shape == (0,)
    assert all_reduce_gradients(model.parameters(), comm) is None
    same(model[0].grad, torch.full((2, 3), 9.0))


def plan_for(comm: Comm, wanted: list[Tensor], n_local: int) -> ExchangePlan:
    """The plan in which this rank receives rows wanted[q] of every owner q."""
    recv_counts = [len(rows) for rows in wanted]
    send_counts = comm.all_to_all_counts(recv_counts)
    send_rows = comm.all_to_all_rows(torch.cat(wanted), recv_counts, send_counts)
    return ExchangePlan(send_rows, send_counts, recv_counts, n_local)


def random_wishes(rank: int, sizes: list[int]) -> list[Tensor]:
    """For each owner some of its rows, each once, in no order; none of one's own."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randperm(size, generator=generator)[: 0 if owner == rank else 2 * size // 3]
        for owner, size in enumerate(sizes)
    ]


def check_exchange() -> dict:
    comm = current()
    for sizes in [[5, 9, 4], [6, 0, 3], [0, 0, 0]]:
        plan = plan_for(comm, random_wishes(comm.rank, sizes), sizes[comm.rank])
        for shape in [(), (3,), (2, 2), (0,)]:
            check_against_table(comm, plan, sizes, shape)
    sizes = [5, 9, 4]
    plan = plan_for(comm, random_wishes(comm.rank, sizes), sizes[comm.rank])
    check_narrow_wire(comm, plan)
    check_without_gradient(comm, plan)
    check_room_used_twice(comm, plan)
    return {"halo_rows": plan.n_halo, "plan": plan, **strided_gradients(comm, plan)}


def check_against_table(comm: Comm, plan: ExchangePlan, sizes: list[int], shape: tuple[int, ...]) -> None:
    """Halo rows and gradients against one process that holds the whole table."""
    generator = torch.Generator().manual_seed(17)
    table = torch.randn(sum(sizes), *shape, dtype=torch.float64, generator=generator).requires_grad_()
    first = sum(sizes[: comm.rank])
    mine = slice(first, first + sizes[comm.rank])
    x = table.detach()[mine].clone().requires_grad_()

    offsets = [sum(sizes[:q]) for q in range(comm.ranks)]
    reference = []
    for rank in range(comm.ranks):
        rows = torch.cat([w + offsets[owner] for owner, w in enumerate(random_wishes(rank, sizes))])
        weight = torch.randn(len(rows), *shape, dtype=torch.float64, generator=generator)
        reference.append((rows, weight))
    sum(((table[rows] ** 2) * weight).sum() for rows, weight in reference).backward()

    rows, weight = reference[comm.rank]
    grads = []
    for _ in range(2):
        x.grad = None
        halo = start_exchange(plan, x, comm).wait()
        same(halo.detach(), table.detach()[rows])
        ((halo**2) * weight).sum().backward()
        grads.append(x.grad)
    same(grads[0], table.grad[mine], rtol=1e-12, atol=1e-12)
    same(grads[0], grads[1])


def strided_gradients(comm: Comm, plan: ExchangePlan) -> dict[str, Tensor]:
    """Gradients of stride zero (`.sum()`), transposed, and contiguous, into a transposed table."""
    weight = torch.randn(3, plan.n_halo, dtype=torch.float64)
    x = torch.randn(3, plan.n_local, dtype=torch.float64).t().requires_grad_()
    found = {}
    for name, loss in {
        "expanded": lambda halo: halo.sum(),
        "transposed": lambda halo: (halo.t() * weight).sum(),
        "contiguous": lambda halo: (halo * weight.t().contiguous()).sum(),
    }.items():
        x.grad = None
        loss(start_exchange(plan, x, comm).wait()).backward()
        found[name] = x.grad
    # One row of width 1 with stride 0 is contiguous to torch, yet has no bytes side by side.
    one = torch.ones((), dtype=torch.float64).expand(1, 1)
    to, source = [[int(q == (comm.rank + d) % 3) for q in range(3)] for d in (1, 2)]
    same(comm.all_to_all_rows(one, to, source), one)
    return found


def test_a10_expanded_gradient_before_an_exchange(on_three_ranks: dict):
    plan = on_three_ranks["plan"]
    asked = torch.bincount(plan.send_rows, minlength=plan.n_local).double()
    same(on_three_ranks["expanded"], asked[:, None].expand(-1, 3))
    same(on_three_ranks["transposed"], on_three_ranks["contiguous"])


def check_narrow_wire(comm: Comm, plan: ExchangePlan) -> None:
    """Rows rounded to bfloat16 on the way, half the bytes; summed in float32, also for a bfloat16 table."""
    asked = torch.bincount(plan.send_rows, minlength=plan.n_local).float()
    x = (torch.arange(plan.n_local * 4.0).view(-1, 4) + 0.001).requires_grad_()
    before = comm.bytes_sent
    halo = start_exchange(plan, x, comm, dtype=torch.bfloat16).wait()
    assert comm.bytes_sent - before == len(plan.send_rows) * 4 * 2
    assert halo.dtype == torch.float32
    exact = start_exchange(plan, x.detach(), comm).wait()
    same(halo.detach(), exact.bfloat16().float())
    (halo * 1.001).sum().backward()
    same(x.grad, (asked * torch.tensor(1.001).bfloat16().float())[:, None].expand(-1, 4))
    half = torch.ones(plan.n_local, 1, dtype=torch.bfloat16, requires_grad=True)
    (start_exchange(plan, half, comm).wait() * (comm.rank + 0.5)).sum().backward()
    requester = torch.repeat_interleave(torch.arange(3), torch.tensor(plan.send_counts))
    total = torch.zeros(plan.n_local).index_add_(0, plan.send_rows, requester + 0.5)
    same(half.grad, total[:, None].bfloat16())


def check_without_gradient(comm: Comm, plan: ExchangePlan) -> None:
    """No gradient, no way back; integers travel too; a rank that neither sends nor receives takes part."""
    ids = torch.arange(plan.n_local) + 100 * comm.rank
    halo = start_exchange(plan, ids, comm).wait()
    assert halo.dtype == torch.int64 and not halo.requires_grad
    owner = torch.repeat_interleave(torch.arange(comm.ranks), torch.tensor(plan.recv_counts))
    same(halo // 100, owner)
    with torch.no_grad():
        assert not start_exchange(plan, torch.ones(plan.n_local, requires_grad=True)).wait().requires_grad
    x = torch.ones(4, 2, requires_grad=True)
    halo = start_exchange(ExchangePlan.none(4, comm.ranks), x, comm).wait()
    assert halo.shape == (0, 2)
    halo.sum().backward()
    same(x.grad, torch.zeros(4, 2))


def check_room_used_twice(comm: Comm, plan: ExchangePlan) -> None:
    """Two models read one batch: the halo rows come into the same room, and both backward passes still hold."""
    room = torch.zeros(plan.n_local + plan.n_halo, 2)
    x = room[: plan.n_local].data
    x += 1.0 + comm.rank
    weights = [torch.full((2,), 3.0 + number, requires_grad=True) for number in range(2)]
    total = torch.zeros(())
    for weight in weights:
        rows = start_exchange(plan, x, comm, room=room).behind(x)
        assert rows is room
        total = total + (rows * weight).square().sum()
    total.backward()
    owner = torch.repeat_interleave(torch.arange(comm.ranks), torch.tensor(plan.recv_counts))
    squares = plan.n_local * (1.0 + comm.rank) ** 2 + float((1.0 + owner).square().sum())
    for number, weight in enumerate(weights):
        same(weight.grad, torch.full((2,), 2 * (3.0 + number) * squares))


def ring_loss(x: Tensor, weight: Tensor, seeds: Tensor) -> Tensor:
    """Mean over all seeds of the squared (own row + predecessor's row) @ weight on a 5-vertex ring."""
    return (((x + x.roll(1, 0)) @ weight)[seeds] ** 2).sum()


@pytest.fixture(scope="module")
def on_two_ranks() -> dict:
    """Everything that is checked on two ranks, in one start; what rank 0 found."""
    return run_ranks(check_two_ranks, 2)


def check_two_ranks() -> dict:
    return {"rings": [separate_rings(seeds) for seeds in RING_SEEDS], "weights": train_on_rank_0_alone()}


# On both rings; all on rank 0's.
RING_SEEDS = [list(range(10)), [1, 3]]


def ring_features() -> Tensor:
    return torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def separate_rings(seeds: list[int]) -> tuple[Tensor, Tensor]:
    """Loss and gradient over two 5-vertex rings, one per rank, with no edge between them."""
    comm = current()
    weight = nn.Parameter(torch.ones(3, 1, dtype=torch.float64))
    x = ring_features()[comm.rank * 5 : comm.rank * 5 + 5].requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    # The halo has no rows, yet the loss depends on it: backward is a collective.
    rows = torch.cat([x, start_exchange(plan_for(comm, [none, none], 5), x, comm).wait()])
    local = torch.tensor([seed % 5 for seed in seeds if seed // 5 == comm.rank], dtype=torch.int64)
    loss = ring_loss(rows, weight, local) / len(seeds)
    loss.backward()
    total = all_reduce_gradients([weight], comm, extra=loss.detach().view(1))
    return total[0], weight.grad


def test_a07_two_separate_rings(on_two_ranks: dict):
    for seeds, (loss, grad) in zip(RING_SEEDS, on_two_ranks["rings"], strict=True):
        weight = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)
        halves = [torch.tensor([s % 5 for s in seeds if s // 5 == r], dtype=torch.int64) for r in range(2)]
        tables = ring_features().split(5)
        expected = sum(ring_loss(x, weight, s) for x, s in zip(tables, halves, strict=True)) / len(seeds)
        expected.backward()
        same(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        same(grad, weight.grad, rtol=1e-12, atol=1e-12)


def train_on_rank_0_alone() -> list[list[Tensor]]:
    """Three steps in which only rank 0 has seeds; then every rank's weights."""
    comm = current()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    for step in range(3):
        model.zero_grad(set_to_none=True)
        if comm.rank == 0:
            model(torch.full((3, 4), float(step))).square().mean().backward()
        all_reduce_gradients(model)
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad
    mine = [parameter.detach() for parameter in model.parameters()]
    return [[comm.broadcast(weight.clone(), source=rank) for weight in mine] for rank in range(comm.ranks)]


def test_a06_rank_without_seeds_keeps_the_same_weights(on_two_ranks: dict):
    first, second = on_two_ranks["weights"]
    for a, b in zip(first, second, strict=True):
        same(a, b)
