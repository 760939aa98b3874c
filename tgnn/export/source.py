"""Writes the code of an exported model: one readable Python file for exactly one stack of layers.

The module that `to_dgl` and `to_pyg` give is made from the same text, so what a folder holds is what was
tested.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import nn

from tgnn.export.kinds.kind import Written, heads_of
from tgnn.export.stack import ACTIVATION_MODULES, Stack
from tgnn.nn.norm import SyncBatchNorm

HERE = Path(__file__).parent
DATA_PARTS = "parts_data.py"


@dataclass(frozen=True)
class Target:
    """What differs between frameworks in the generated file."""

    layers_module: str
    """Where its layers come from, for example dgl.nn."""
    parts: str
    """Name of the file of definitions to copy from."""
    inputs: str
    """First arguments of `forward`, for example `g, x`."""
    inputs_doc: str
    own_rows: str
    """Expression of the destinations' rows of h, `{number}` being the layer's."""
    takes_blocks: bool


@cache
def _definitions(file: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> (source text, import lines it needs) of every class and function of a parts file."""
    text = (HERE / file).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    imports: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                line = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                imports[alias.asname or alias.name] = line
        elif isinstance(node, ast.ImportFrom):
            imports.update({alias.name: f"from {node.module} import {alias.name}" for alias in node.names})
    found = {}
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            used = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
            needs = tuple(line for name, line in imports.items() if name in used)
            found[node.name] = ("\n".join(lines[node.lineno - 1 : node.end_lineno]), needs)
    return found


def module_source(
    title: str, stack: Stack, written: Sequence[Written], target: Target, weighted: bool,
    steps: Sequence[str] | None = None,
) -> str:  # fmt: skip
    """The text of `model.py`.

    Args:
        title: first line of its docstring.
        stack, written: the model, and its layers in the framework's code.
        weighted: whether the data has edge weights: `forward` then demands them where a layer uses them.
        steps: names of the data parts that prepare a graph, in order; None leaves out `prepare` and `load`.
    """
    needed, parts = {name for layer in written for name in layer.names}, _definitions(target.parts)
    chosen = [definition for name, definition in parts.items() if name in needed]
    chosen += [definition for name, definition in _definitions(DATA_PARTS).items() if name in (steps or ())]
    imports = {line for _, lines in chosen for line in lines} | {"from torch import nn"}
    imports |= {f"from {target.layers_module} import {name}" for name in needed if name not in parts}
    if steps is not None:
        imports |= {"from pathlib import Path", "import torch"}
    pieces = [f'"""{title}"""', _import_block(imports)]
    pieces += ["\n" + text for text, _ in chosen]
    pieces.append("\n" + _class(stack, written, target, weighted))
    if steps is not None:
        pieces += ["\n" + _prepare(steps, weighted), "\n" + _load(stack.dtype)]
    return "\n\n".join(pieces) + "\n"


def _import_block(lines: Iterable[str]) -> str:
    """Import lines, sorted, names of one module together, the standard library first."""
    plain = sorted(line for line in lines if line.startswith("import "))
    by_module: dict[str, list[str]] = {}
    for line in sorted(lines):
        if line.startswith("from "):
            _, module, _, name = line.split()
            by_module.setdefault(module, []).append(name)
    joined = [f"from {module} import {', '.join(names)}" for module, names in sorted(by_module.items())]
    standard = [line for line in joined if line.startswith("from pathlib")]
    others = plain + [line for line in joined if line not in standard]
    return "\n".join([*standard, "", *others] if standard else others)


def arguments_of(written: Sequence[Written]) -> list[str]:
    """What `forward` takes besides the graph and the rows, in order."""
    given = {name for layer in written for name in layer.arguments}
    return [name for name in ("edge_weight", "gcn_weight", "degrees") if name in given]


def _class(stack: Stack, written: Sequence[Written], target: Target, weighted: bool) -> str:
    merged = [heads_of(layer) for layer in stack.layers]
    heads = ", ".join("None" if how is None else f'"{how}"' for how in merged)
    depth = f"{len(written)} layers" if len(written) > 1 else "One layer"
    lines = [
        "class Model(nn.Module):",
        f'    """{depth}: {stack.in_features} features of a vertex to {stack.out_features} logits."""',
        "",
        "    # What becomes of each layer's attention heads; `tgnn.export` reads a model back by this.",
        f"    tgnn_heads = [{heads}]",
        *(["    gcn_weight = staticmethod(gcn_weight)"] if "gcn_weight" in arguments_of(written) else []),
        "",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.dropout = nn.Dropout({stack.dropout})",
        f"        self.activation = nn.{ACTIVATION_MODULES[stack.activation]}()",
        *_module_list("layers", [layer.make for layer in written]),
    ]
    for name, modules in (("norms", stack.norms), ("residuals", stack.residuals)):
        if modules is not None:
            lines += _module_list(name, [_between(module) for module in modules])
    return "\n".join([*lines, "", *_forward(stack, written, target, weighted)])


def _module_list(name: str, makes: Sequence[str]) -> list[str]:
    return [
        f"        self.{name} = nn.ModuleList([",
        *(f"            {make}," for make in makes),
        "        ])",
    ]


def _between(module: nn.Module) -> str:
    """A norm or residual as code."""
    if isinstance(module, nn.LayerNorm):
        return f"nn.LayerNorm({module.normalized_shape[0]}, eps={module.eps!r})"
    if isinstance(module, SyncBatchNorm):
        return f"nn.BatchNorm1d({len(module.weight)}, eps={module.eps!r}, momentum={module.momentum!r})"
    if isinstance(module, nn.Linear):
        return f"nn.Linear({module.in_features}, {module.out_features}, bias={module.bias is not None})"
    return "nn.Identity()"


_ARGUMENT_DOCS = {
    "edge_weight": "edge_weight: weights of the data, one per edge{blocks}.",
    "gcn_weight": "gcn_weight: what the function of that name gives for the whole graph, one per edge.",
    "degrees": "degrees: (in-degrees, out-degrees) of the whole graph, needed with blocks only.",
}


def _forward(stack: Stack, written: Sequence[Written], target: Target, weighted: bool) -> list[str]:
    arguments = arguments_of(written)
    optional = {"degrees"} if weighted else {"edge_weight", "degrees"}
    signature = ", ".join(
        [target.inputs, *(f"{name}=None" if name in optional else name for name in arguments)]
    )
    blocks = " (with blocks a list)" if target.takes_blocks else ""
    docs = [target.inputs_doc, *(_ARGUMENT_DOCS[name].format(blocks=blocks) for name in arguments)]
    lines = [f"    def forward(self, {signature}):", f'        """Logits [n, {stack.out_features}].', ""]
    lines += [*(f"        {doc}" for doc in docs), '        """']
    if target.takes_blocks:
        lines.append(f"        blocks = g if isinstance(g, (list, tuple)) else [g] * {len(written)}")
        if "edge_weight" in arguments:
            given = "edge_weight if isinstance(edge_weight, (list, tuple)) else [edge_weight]"
            lines.append(f"        weights = {given} * {len(written)}")
    lines.append("        h = x")
    for number, layer in enumerate(written):
        lines += [f"        {line}" for line in _steps(stack, number, layer, target)]
    return [*lines, "        return h"]


def _steps(stack: Stack, number: int, layer: Written, target: Target) -> list[str]:
    """The statements of one layer with what stands around it."""
    lines = ["h = self.dropout(h)"] if stack.dropout else []
    last = number == len(stack.layers) - 1
    shortcut = stack.residuals is not None and not last
    if shortcut:
        lines.append(f"own = {target.own_rows.format(number=number)}")
    call = layer.call.format(layer=f"self.layers[{number}]", number=number)
    if layer.before:
        lines.append(layer.before.format(number=number))
    lines.append(f"h = {call}  # [n, {stack.layers[number].out_features}]")
    if not last:
        if shortcut:
            lines.append(f"h = h + self.residuals[{number}](own)")
        if stack.norms is not None:
            lines.append(f"h = self.norms[{number}](h)")
        lines.append("h = self.activation(h)")
    return lines


def _prepare(steps: Sequence[str], weighted: bool) -> str:
    """The function that does to a graph and its features what was done before training."""
    weight = ", edge_weight" if weighted else ""
    lines = [
        f"def prepare(edge_index, num_nodes, x{weight}):",
        f'    """(edge_index, x{weight}) as in training, from those of the data as published.',
        "",
        "    edge_index: int64 [2, E], row 0 sources, row 1 destinations: a message goes from source to",
        "    destination. num_nodes: number of vertices. x: float32 features, one row per vertex.",
        *(["    edge_weight: float32 [E]."] if weighted else []),
        '    """',
    ]
    for step in steps:
        if step.startswith("normalise"):
            lines.append(f"    x = {step}(x)")
        else:
            given, taken = (", edge_weight", "edge_weight") if weighted else ("", "_")
            lines.append(f"    edge_index, {taken} = {step}(edge_index, num_nodes{given})")
    return "\n".join([*lines, f"    return edge_index, x{weight}"])


def _load(dtype: torch.dtype) -> str:
    double = ".double()" if dtype == torch.float64 else ""
    return f'''def load():
    """The trained model, ready to score, with the weights beside this file."""
    model = Model(){double}
    file = Path(__file__).parent / "weights.pt"
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return model.eval()'''


def execute(text: str, framework: str) -> types.ModuleType:
    """The module of a generated text; the same text gives the same module.

    It is known to `sys.modules`, where PyG looks up the module of a layer, and its lines are to tracebacks.
    """
    name = f"tgnn_exported_{framework}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    try:
        exec(compile(text, module.__file__, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def instantiate(text: str, framework: str, state: dict[str, torch.Tensor], like: nn.Module) -> nn.Module:
    """The generated `Model` with these weights, of `like`'s type, on its device and in its mode."""
    module = execute(text, framework).Model()
    parameter = next(like.parameters())
    module.to(parameter.dtype).load_state_dict(state, strict=True)
    return module.to(parameter.device).train(like.training)
