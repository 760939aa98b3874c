"""GNN: a stack of layers with the exchange of halo rows between them.

Layer l of the stack computes, for l = 0 .. L-1 with x_0 the features:

    h       = layer_l(block_l, rows of dropout(x_l))
    x_{l+1} = activation(norm(h + residual(x_l of the destinations)))          hidden layers
    x_L     = h                                                                the last one

Feature dropout is keyed by (seed, epoch, step, layer, original vertex id, column) and done by a row's owner, so every
rank that asks for the row sees the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tgnn.errors import wrong
from tgnn.kernels import rng
from tgnn.kernels.dropout import dropout
from tgnn.kernels.gather import gather
from tgnn.nn.gat import GATConv, GATv2Conv
from tgnn.nn.gcn import GCNConv
from tgnn.nn.gin import GINConv
from tgnn.nn.layer import Layer, Rows, as_layer
from tgnn.nn.norm import NORMS, SyncBatchNorm, make_norm
from tgnn.nn.products import Linear
from tgnn.nn.sage import SAGEConv
from tgnn.nn.transformer import TransformerConv
from tgnn.parallel.comm import current
from tgnn.parallel.exchange import start_exchange
from tgnn.sampling.minibatch import MiniBatch

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "elu": F.elu, "gelu": F.gelu, "leaky_relu": F.leaky_relu, "tanh": torch.tanh, "none": lambda x: x,
}  # fmt: skip
MODELS = ("sage", "gcn", "gat", "gatv2", "gin", "transformer")
ATTENTION_LAYERS = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


class GNN(nn.Module):
    """A stack of layers that trains on mini-batches of any number of ranks.

    `GNN([SAGEConv(16, 64), SAGEConv(64, 7)])` stacks the given layers, plain modules with `forward(block, x)`
    included; `GNN.build("sage", ...)` makes the layers too.
    """

    def __init__(
        self, layers: Sequence[nn.Module], *, dropout: float = 0.0, activation: str = "relu", norm: str = "none",
        residual: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            layers: input layer first.
            dropout: probability of dropping an element of each layer's input while training.
            activation: after every layer but the last: relu, elu, gelu, leaky_relu, tanh or none.
            norm: before the activation: none, layer or batch; the layers then need an `out_features`.
            residual: add a hidden layer's input rows to its output, through a linear map where widths differ; the
                layers then need `in_features` and `out_features`.
        """
        super().__init__()
        if not layers:
            raise wrong("GNN layers", "none", "one or more modules", "give at least one layer")
        if activation not in ACTIVATIONS:
            raise wrong(
                "activation", repr(activation), f"one of {', '.join(ACTIVATIONS)}", "choose one of these"
            )
        if norm not in NORMS:
            raise wrong("norm", repr(norm), f"one of {', '.join(NORMS)}", "choose one of these")
        if not 0 <= dropout < 1:
            raise wrong("dropout", dropout, "a number in [0, 1)", "choose a smaller one")
        self.layers = nn.ModuleList(as_layer(layer) for layer in layers)
        self.dropout, self.activation = dropout, activation
        hidden = list(layers)[:-1]
        self.norms = self.residuals = None
        if norm != "none":
            self.norms = nn.ModuleList(make_norm(norm, _width(layer, "out_features")) for layer in hidden)
        if residual:
            self.residuals = nn.ModuleList(_shortcut(layer) for layer in hidden)

    @classmethod
    def build(
        cls, model: str, in_features: int, hidden: int, out_features: int, layers: int = 2, *, heads: int = 4,
        output_heads: int = 1, aggregator: str = "mean", dropout: float = 0.0, attention_dropout: float = 0.0,
        activation: str = "relu", norm: str = "none", residual: bool = False,
    ) -> GNN:  # fmt: skip
        """A stack of one kind of layer: sage, gcn, gat, gatv2, gin or transformer.

        For attention models `hidden` is the width per head: hidden layers join `heads`, the last averages
        `output_heads`. Weights come from torch's global generator.
        """
        if model not in MODELS:
            raise wrong("model", repr(model), f"one of {', '.join(MODELS)}", "choose one of these")
        stack: list[nn.Module] = []
        width = in_features
        for number in range(layers):
            last = number == layers - 1
            out = out_features if last else hidden
            if model in ATTENTION_LAYERS:
                kind = ATTENTION_LAYERS[model]
                count = output_heads if last else heads
                stack.append(kind(width, out, count, attention_dropout=attention_dropout, concat=not last))
            elif model == "sage":
                stack.append(SAGEConv(width, out, aggregator))
            else:
                stack.append((GCNConv if model == "gcn" else GINConv)(width, out))
            width = stack[-1].out_features
        return cls(stack, dropout=dropout, activation=activation, norm=norm, residual=residual)

    def forward(self, batch: MiniBatch) -> Tensor:
        """Logits of the batch's seeds on this rank, [B, classes]; a collective where the batch has halo rows."""
        if len(batch.blocks) != len(self.layers):
            got, do = f"{len(batch.blocks)} blocks", "give the loader one fanout per layer"
            raise wrong("mini-batch", got, f"one for each of {len(self.layers)} layers", do)
        if batch.x is None:
            raise wrong(
                "mini-batch", "no features", "feature rows of the input vertices", "give the data features"
            )
        self._check_norm(batch)
        x = batch.x
        if batch.dst_rows is not None and not self.reads_in_place:
            got, do = "all features in place", "make the loader without in_place"
            raise wrong("mini-batch", got, "the input rows, which this model changes or projects", do)
        for number, layer in enumerate(self.layers):
            x = self.before_layer(
                number, x, batch.ids[number], batch.dropout_key(rng.FEATURE_DROPOUT, number)
            )
            local = layer.before_exchange(x)
            block, key = batch.blocks[number], batch.dropout_key(rng.ATTENTION_DROPOUT, number)
            # What goes on as it is meets all its gradients in one place.
            unchanged = local is x
            head = block.n_dst if unchanged else 0
            room = batch.room if local is batch.x else None
            halo = start_exchange(
                batch.plans[number], local, batch.comm, batch.exchange_dtype, head=head, room=room
            )
            own, x_dst = (halo.local, halo.head) if unchanged else (x, x[: block.n_dst])
            if number == 0 and batch.dst_rows is not None:
                x_dst = gather(x, batch.dst_rows)
            local_dst = x_dst if unchanged else None
            out = layer(block, Rows(own, halo.local, halo, key, batch.stage, x_dst, local_dst))
            x = self.after_layer(number, out, x_dst)
        return x

    @property
    def reads_in_place(self) -> bool:
        """Whether its input layer takes the table of all features as it is: see `Loader`'s in_place."""
        first = self.layers[0] if len(self.layers) else None
        kept = self.dropout == 0 or not self.training
        return kept and isinstance(first, Layer) and first.reads_features_in_place

    def _check_norm(self, batch: MiniBatch) -> None:
        # Ranks that sample alone meet the same hidden vertex several times: their common mean would count it as often.
        alone = self.training and batch.comm.ranks != current().ranks
        if alone and any(isinstance(module, SyncBatchNorm) for module in self.modules()):
            do = "sample with parallel='split' in one group, or use layer norm"
            raise wrong(
                "batch norm", "a batch of data mode or of replicas", "one that all ranks sampled together", do
            )

    def before_layer(self, number: int, x: Tensor, ids: Tensor, key: int) -> Tensor:
        """A layer's input rows with dropout while training: [n, F] -> [n, F]; ids [n] are original vertex ids."""
        return dropout(x, self.dropout, key, ids) if self.training and self.dropout else x

    def after_layer(self, number: int, out: Tensor, x_dst: Tensor) -> Tensor:
        """Residual, norm and activation of a hidden layer's output; the last layer's passes through."""
        if number == len(self.layers) - 1:
            return out
        if self.residuals is not None:
            out = out + self.residuals[number](x_dst)
        if self.norms is not None:
            out = self.norms[number](out)
        return ACTIVATIONS[self.activation](out)


def _width(layer: nn.Module, name: str) -> int:
    if not hasattr(layer, name):
        what, do = f"{type(layer).__name__}", f"set self.{name} in the layer"
        raise wrong(what, f"no {name}", f"an attribute {name}, which norm and residual need", do)
    return getattr(layer, name)


def _shortcut(layer: nn.Module) -> nn.Module:
    before, after = _width(layer, "in_features"), _width(layer, "out_features")
    return nn.Identity() if before == after else Linear(before, after, bias=False)
