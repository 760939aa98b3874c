"""Your own graph, your own layer and your own training loop, on four ranks: `python examples/own_loop.py`."""

import torch
from torch.nn.functional import cross_entropy, one_hot

import tgnn
from tgnn.kernels import spmm


class MeanLayer(torch.nn.Module):
    """A layer of your own: any module with `forward(block, x)`, a row of x per source, destinations first."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2 * in_width, out_width)

    def forward(self, block, x):
        """[n_src, in_width] -> [n_dst, out_width]."""
        return self.linear(torch.cat([x[: block.n_dst], spmm(block, x, reduce="mean")], dim=1))


def train(store: tgnn.Store) -> torch.Tensor | None:
    """Runs on every rank; all of them see the same loss, gradients and weights as one rank alone would."""
    torch.manual_seed(0)
    model = tgnn.nn.GNN([MeanLayer(16, 32), MeanLayer(32, 4)]).to(tgnn.current().device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = tgnn.Loader(store, fanouts=[10, 10], batch_size=256)
    for _ in range(10):
        for batch in loader:
            loss = cross_entropy(model(batch), batch.y, reduction="sum") / batch.global_seeds
            optimizer.zero_grad()
            loss.backward()
            tgnn.all_reduce_gradients(model)
            optimizer.step()
    return tgnn.predict(model, store)  # scores of all vertices in your order, on rank 0


def main() -> None:
    """2,000 vertices of 4 kinds; most of their 17,000 edges join vertices of a kind; features say little."""
    torch.manual_seed(0)
    y = torch.randint(4, (2000,))
    source, destination = torch.randint(2000, (2, 60_000))
    kept = (y[source] == y[destination]) | (torch.rand(60_000) < 0.05)
    edge_index = torch.stack([source, destination])[:, kept]
    x = torch.cat([one_hot(y, 4) + 1.5 * torch.randn(2000, 4), torch.randn(2000, 12)], dim=1)

    graph = tgnn.Graph.from_edge_index(edge_index, num_vertices=2000)
    dataset = tgnn.Dataset("my graph", graph, x, y, train=torch.arange(1000))
    scores = tgnn.launch(train, tgnn.prepare(dataset, parts=4), ranks=4)
    accuracy = (scores.argmax(1) == y)[1000:].float().mean()
    print(f"accuracy on the other 1,000 vertices: {accuracy:.3f}")


if __name__ == "__main__":
    main()
