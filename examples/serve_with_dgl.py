"""Score an exported model where torch, numpy and DGL are installed, but not tgnn.

    python -m tgnn.export runs/cora-gcn-1 --to dgl --out served --verify      # where tgnn is
    python serve_with_dgl.py served cora.npz                                  # where DGL is

The data are read as published, and prepared by the exported folder's own `prepare`;
`tgnn.data.save_npz(dataset, path)` writes such a file: `indptr` and `indices` of the in-edges, `x`, `y`, and
ids of `test` vertices.
"""

import sys

import dgl
import numpy as np
import torch

sys.path.insert(0, sys.argv[1])
from model import load, prepare  # noqa: E402

data = {name: torch.from_numpy(array) for name, array in np.load(sys.argv[2], allow_pickle=False).items()}
num_nodes = len(data["x"])
destination = torch.repeat_interleave(torch.arange(num_nodes), data["indptr"].diff())
edge_index, x = prepare(torch.stack([data["indices"].long(), destination]), num_nodes, data["x"])
g = dgl.graph((edge_index[0], edge_index[1]), num_nodes=num_nodes)
with torch.no_grad():
    right = load()(g, x).argmax(1) == data["y"]
print(f"test accuracy {right[data['test']].double().mean():.4f}")
