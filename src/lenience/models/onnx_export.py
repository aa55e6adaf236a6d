"""A model's forward pass as a graph for ONNX Runtime.

The graph takes the cached keys and values in place, at full capacity, and returns the new ones.
Attention scores are computed over both without concatenating them, so no keys are copied; the mask
excludes unused columns of the cache. A draft's graph can continue by itself: a loop in the graph
reads the most probable token after each pass.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import rewriter
from onnxscript.optimizer import optimize_ir
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lenience.core.files import replacing
from lenience.models.kv_cache import NOWHERE, Visibility, positions
from lenience.models.lm import LM
from lenience.models.pass_cache import LAST, States, cache_argument
from lenience.models.vocabulary import restrict, vocabulary_of

_TRACING = threading.RLock()


def export_graph(
    lm: LM, path: Path, states: States = LAST, trees: bool = False
) -> None:
    """Export a model's forward pass into a file, which takes some seconds. A copy that shares the
    weights is traced, so that the model can decode meanwhile.

    Inputs: ids [m, T], of which the first pads [m] are padding; cached [m], the number of cached
    tokens; past_0 …, the cached states, each [m, H, C, D]; kept [S], the indices of the T tokens
    whose logits are returned. Outputs: logits [m, S, V], hidden [m, S, H], features [m, T, F] if
    any, and the new states new_0 …, each [m, H, T, D].

    A draft's graph without features also takes steps [N], the numbers from 0 on, and reads N
    further tokens, each the most probable after its predecessor. It also returns step_logits [N, m,
    V] and step_hidden [N, m, H], and its new states are [m, H, T + N, D].

    The graph of a model that `reads_inputs` also takes inputs [m, T, H]; each step of its loop
    takes the last states of the step before.

    The file holds the graph alone. The graph refers to each weight by its name in the model, and
    ONNX Runtime receives the weights when the file is loaded.

    A graph for `trees` takes, in place of pads and cached, the positions at [m, T] of the tokens,
    the positions keys [m, C + T] of cached and new tokens, and related [m, T, C + T], which is
    False for keys on another branch.
    """
    with _TRACING, torch.no_grad(), _quiet():
        loops = lm.role == "draft" and not states.features
        make = _tree_graph if trees else _looping_graph if loops else _plain_graph
        model = make(lm, states)
        _refer_to_weights(model.graph, lm.model)
        _leave_out_comments(model)
    with replacing(path) as new:
        ir.save(model, new)


Traced = dict[str, tuple[Any, Any]]
"""Arguments of a traced module: the value of each argument, and its dimensions that vary. A list of
values with separate names has these names as its key, joined by commas."""


def _plain_graph(lm: LM, states: States) -> ir.Model:
    arguments = _arguments(lm, loops=False)
    outputs = _outputs(states, arguments["past"][0])
    return _trace(_First(lm, states), arguments, outputs)


def _outputs(states: States, past: Sequence[Tensor]) -> list[str]:
    features = ["features"] if states.features else []
    return ["logits", "hidden", *features, *_numbered("new", past)]


def _tree_graph(lm: LM, states: States) -> ir.Model:
    past, past_varies = _arguments(lm, loops=False)["past"]
    arguments = {
        "ids": (torch.ones(2, 5, dtype=torch.long), {0: "m", 1: "T"}),
        "at,keys,related": (
            [
                torch.arange(7, 12).repeat(2, 1),
                torch.arange(37).repeat(2, 1),
                torch.ones(2, 5, 37, dtype=torch.bool),
            ],
            [{0: "m", 1: "T"}, {0: "m", 1: "K"}, {0: "m", 1: "T", 2: "K"}],
        ),
        "kept": (torch.arange(2, 5), {0: "S"}),
        "past": (past, past_varies),
        "inputs": _inputs(lm),
    }
    return _trace(_Branching(lm, states), arguments, _outputs(states, past))


def _looping_graph(lm: LM, states: States) -> ir.Model:
    """Return the graph of the first pass, followed by a loop whose body reads one token."""
    first = _First(lm, states)
    arguments = _arguments(lm, loops=True)
    past, past_varies = arguments["past"]
    outputs = ["logits", "hidden", *_numbered("near", past), "after", "places", "token"]
    outputs += ["state"] if lm.reads_inputs else []
    model = _trace(first, arguments, outputs)
    values = first(*(value for value, _ in arguments.values()))
    near, after, places, *said = values[2:]
    names = ["token", "state"][: len(said)]
    arguments = {
        "i": (torch.tensor(1), {}),
        ",".join(names): (said, [{0: "m"}] * len(said)),
        "after,places": ([after, places], [{0: "m"}, {0: "m", 1: "P"}]),
        "near": (near, [{0: "m", 2: "K"}] * len(near)),
        "past": (past, past_varies),
    }
    then = [f"{name}_then" for name in names]
    outputs = [*then, *_numbered("later", past), "step_logits", "step_hidden"]
    _add_loop(
        model.graph, _trace(_Step(lm, states), arguments, outputs).graph, len(past)
    )
    return model


def _arguments(lm: LM, loops: bool) -> Traced:
    """Return the arguments with which the first pass is traced."""
    layers, heads, size = _cache_shape(lm)
    past = [torch.randn(2, heads, 32, size) for _ in range(2 * layers)]
    return {
        "ids": (torch.ones(2, 5, dtype=torch.long), {0: "m", 1: "T"}),
        "pads,cached": ([torch.tensor([0, 1]), torch.tensor([7, 9])], [{0: "m"}] * 2),
        "kept": (torch.arange(2, 5), {0: "S"}),
        "steps": (torch.arange(4), {0: "N"}) if loops else (None, None),
        "past": (past, [{0: "m", 2: "C"}] * len(past)),
        "inputs": _inputs(lm),
    }


def _inputs(lm: LM) -> tuple[Any, Any]:
    """Return the traced argument `inputs` of a model that reads inputs; None, None for other
    models."""
    if not lm.reads_inputs:
        return None, None
    return torch.randn(2, 5, lm.hidden_size), {0: "m", 1: "T"}


class _Twin(torch.nn.Module):
    """A model that shares another model's weights, with the graph's attention, to be traced."""

    def __init__(self, lm: LM, states: States):
        super().__init__()
        self.lm = lm
        self.attention = _Attention()
        name = f"lenience_graph_{id(self)}"
        ALL_ATTENTION_FUNCTIONS.register(name, self.attention)
        self.model = _on_same_weights(lm.model, name)
        self.states = states
        self.caught = dict[str | int | None, Tensor]()
        head = cast(torch.nn.Module, self.model.get_output_embeddings())
        head.register_forward_pre_hook(lambda _, args: self._catch("head", args[0]))
        for layer in {*states.layers, *states.features}:
            block = (
                self.model.get_decoder()
                if layer is None
                else lm.block(layer, self.model)
            )
            block.register_forward_hook(
                lambda _, args, out, layer=layer: self._catch(layer, out)
            )
        self.eval()

    def _catch(self, what: str | int | None, states: Any) -> None:
        self.caught[what] = states if isinstance(states, Tensor) else states[0]

    def read(
        self,
        ids: Tensor,
        sight: Visibility,
        kept: Tensor | int,
        past: list[Tensor],
        layers: list[_TracedLayer],
        inputs: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Return logits, hidden states, features if any, and the new keys and values of `ids` [m,
        T]."""
        self.attention.past = past
        masks = sight.masks(self.lm)
        out = self.model(
            input_ids=ids,
            position_ids=sight.at,
            attention_mask=masks if len(masks) > 1 else masks["full_attention"],
            **cache_argument(self.model, Cache(layers=list(layers))),
            use_cache=True,
            logits_to_keep=kept,
            **({} if inputs is None else {"inputs": inputs}),
        )
        new = []
        for layer in layers:
            for states in (layer.keys, layer.values):
                new.append(cast(Tensor, states))
        parts = [self._hidden(layer, kept, inputs) for layer in self.states.layers]
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        if not self.states.features:
            return out.logits, hidden, new
        features = torch.cat([self.caught[layer] for layer in self.states.features], -1)
        return out.logits, hidden, features, new

    def _hidden(
        self, layer: int | None, kept: Tensor | int, inputs: Tensor | None
    ) -> Tensor:
        if layer is None and inputs is None:
            return self.caught["head"]
        # a layer, or a decoder whose norm belongs to its head, returns states of all tokens
        hidden = self.caught[layer]
        return hidden[:, -kept:] if isinstance(kept, int) else hidden[:, kept]


class _First(_Twin):
    def forward(
        self,
        ids: Tensor,
        where: list[Tensor],
        kept: Tensor,
        steps: Tensor | None,
        past: list[Tensor],
        inputs: Tensor | None,
    ) -> tuple[Any, ...]:
        """Return the first pass and, with `steps` [N], the start of the loop: the new states with
        room for N more, the next position [m], the positions [m, C + T + N] of all states, the most
        probable token [m], and the last hidden states [m, H] if the model reads inputs."""
        pads, cached = where
        at, padding = positions(ids, pads, cached)
        columns = torch.arange(past[0].shape[2])
        old = torch.where(columns < cached[:, None], columns, NOWHERE)  # [m, C]
        keys = torch.cat([old, at.masked_fill(padding, NOWHERE)], 1)
        layers = [_TracedLayer() for _ in past[::2]]
        read = self.read(
            ids, Visibility(at, keys), kept, past, layers=layers, inputs=inputs
        )
        if steps is None:
            return read
        logits, hidden, new = read
        after = cached + ids.shape[1] - pads
        near = []
        for states in new:
            near.append(torch.nn.functional.pad(states, (0, 0, 0, steps.shape[0])))
        token = logits[:, -1].argmax(-1)
        places = torch.cat([keys, after[:, None] + steps], 1)
        state = [] if inputs is None else [hidden[:, -1]]
        return logits, hidden, near, after, places, token, *state


class _Branching(_Twin):
    def forward(
        self,
        ids: Tensor,
        sight: list[Tensor],
        kept: Tensor,
        past: list[Tensor],
        inputs: Tensor | None,
    ) -> tuple[Any, ...]:
        """Return the pass over trees."""
        layers = [_TracedLayer() for _ in past[::2]]
        return self.read(
            ids, Visibility(*sight), kept, past, layers=layers, inputs=inputs
        )


class _Step(_Twin):
    def forward(
        self,
        i: Tensor,
        said: list[Tensor],
        where: list[Tensor],
        near: list[Tensor],
        past: list[Tensor],
    ) -> tuple[Any, ...]:
        """Return a pass of the loop over the tokens in `said` [m]; a model that reads inputs finds
        its states [m, H] there too. The result is the next token, its state if any, the states
        `near` with the new ones filled in, logits and hidden states."""
        (token, *state), (after, places) = said, where
        at = (after + i)[:, None]  # [m, 1]
        here = (places[:, past[0].shape[2] :] == at)[:, None, :, None]  # [m, 1, K, 1]
        layers = [_TracedLayer(here, *states) for states in zip(near[::2], near[1::2])]
        inputs = state[0][:, None] if state else None
        logits, hidden, near = self.read(
            token[:, None],
            Visibility(at, places),
            1,
            past,
            layers=layers,
            inputs=inputs,
        )
        carried = [hidden[:, -1]] if state else []
        return logits[:, -1].argmax(-1), *carried, near, logits[:, -1], hidden[:, -1]


class _TracedLayer(CacheLayerMixin):
    """Keys and values of a layer during tracing. In a loop the new ones are written into `near`
    where `here` is True. They are kept for the graph's output."""

    is_sliding = False

    def __init__(self, here: Tensor | None = None, *near: Tensor) -> None:
        super().__init__()
        self.is_initialized = True
        self.here = here
        self.near = near

    def lazy_initialization(self, *_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if self.here is not None:
            new = cast(
                tuple[Tensor, Tensor],
                tuple(torch.where(self.here, *pair) for pair in zip(new, self.near)),
            )
        self.keys, self.values = new
        return new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def _on_same_weights(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Return a model that shares another model's weights, with a different attention function."""
    make = getattr(model, "with_attention", None)
    if make:
        return cast(PreTrainedModel, make(attention))
    config = copy.deepcopy(model.config)
    other = type(model)._from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    tokens = vocabulary_of(model)
    if tokens is not None:
        restrict(other, tokens)
    other.load_state_dict(model.state_dict(), assign=True)
    if tokens is None:
        other.tie_weights()
    return cast(PreTrainedModel, other)


class _Attention:
    """Attention over cached states in place and the new states, with the signature of
    `transformers`."""

    past: Sequence[Tensor] = ()
    """Cached keys and values of the pass that is being traced, each [m, H, C, D], two per layer."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return attention of `query` [m, G · H, T, D] over the cached and the given `key` and
        `value` [m, H, T, D]. The G heads that share a key are treated as further queries, so that
        no keys are copied."""
        scaling = options.get("scaling")
        softcap = options.get("softcap")
        layer = cast(int, module.layer_idx)
        # [m, H, C, D]
        old_key = self.past[2 * layer]
        old_value = self.past[2 * layer + 1]
        m, heads, t, size = query.shape
        grouped = heads != key.shape[1]
        query = query * (size**-0.5 if scaling is None else scaling)
        if grouped:
            query = query.reshape(m, key.shape[1], -1, size)  # [m, H, G · T, D]
        # [m, H, G · T, C + T]
        scores = torch.cat(
            [query @ old_key.transpose(2, 3), query @ key.transpose(2, 3)], -1
        )
        if grouped:
            scores = scores.view(m, heads, t, -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        # not −inf: a row of padding sees nothing, and must not become NaN
        least = torch.finfo(scores.dtype).min
        weights = torch.softmax(torch.where(attention_mask, scores, least), -1)
        if grouped:
            weights = weights.view(m, key.shape[1], -1, weights.shape[-1])
        capacity = old_key.shape[2]
        out = weights[..., :capacity] @ old_value + weights[..., capacity:] @ value
        return out.view(m, heads, t, size).transpose(1, 2).contiguous(), None


def _cache_shape(lm: LM) -> tuple[int, int, int]:
    """Return the number of layers, the number of heads and the head size of keys and values. Raises
    ValueError if layers differ."""
    with torch.inference_mode():
        layers = lm.model(
            torch.zeros(1, 1, dtype=torch.long), use_cache=True
        ).past_key_values.layers
    shapes = {states.shape for layer in layers for states in (layer.keys, layer.values)}
    if len(shapes) > 1:
        raise ValueError("its layers keep states of different shapes")
    ((_, heads, _, size),) = shapes
    return len(layers), heads, size


def _numbered(name: str, values: Sequence[Tensor]) -> list[str]:
    return [f"{name}_{i}" for i in range(len(values))]


def _trace(module: _Twin, arguments: Traced, outputs: list[str]) -> ir.Model:
    """Return the graph of a module's forward, traced with `arguments`."""
    names: list[str] = []
    for name, (value, _) in arguments.items():
        if isinstance(value, list):
            names += (
                name.split(",")
                if name not in ("past", "near")
                else _numbered(name, value)
            )
        elif value is not None:
            names.append(name)
    values = tuple(value for value, _ in arguments.values())
    varies = tuple(varies for _, varies in arguments.values())
    options: dict[str, Any] = {
        "input_names": names,
        "output_names": outputs,
        "dynamic_shapes": varies,
        "dynamo": True,
        "verbose": False,
        "optimize": False,  # it would compute constants from weights, and merge equal weights
    }
    try:
        program = torch.onnx.export(_traced_once(module, values, varies), (), **options)
    except Exception:  # an operation must be decomposed, which takes twice as long
        program = torch.onnx.export(module, values, **options)
    assert program is not None
    _name_weights(program.model.graph, module.model)
    with _linear_rules():
        optimize_ir(program.model)
    for node in list(program.model.graph):
        _divide(program.model.graph, node)
    return program.model


def _traced_once(
    module: torch.nn.Module, values: tuple[Any, ...], varies: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    """Trace a module into a program that the exporter does not trace again to decompose it. Raises
    ValueError for an operation that writes into its argument."""
    free = torch.export.Dim.DYNAMIC
    shapes = tree_map(lambda dim: free if isinstance(dim, str) else dim, varies)
    # a batch may have one row, and a window one token
    config: Any = torch.fx.experimental._config
    with config.patch(backed_size_oblivious=True):
        program = torch.export.export(
            module, values, dynamic_shapes=shapes, strict=False
        )
    for node in program.graph.nodes:
        _replace_operation(node)
    # ONNX has every operation that is left
    program.run_decompositions = lambda *_: program
    return program


def _replace_operation(node: torch.fx.Node) -> None:
    """Replace an operation that ONNX has under another name only. Raises ValueError if the
    operation writes into its argument."""
    aten = torch.ops.aten
    schema = getattr(node.target, "_schema", None)  # of an operation of torch
    if schema is None:
        return
    if schema.is_mutable:
        raise ValueError(f"{node.target} writes into its argument")
    if node.target is aten.__and__.Tensor:
        node.target = aten.bitwise_and.Tensor
    elif node.target in (aten.to.dtype, aten.to.dtype_layout, aten.to.device):
        names = [argument.name for argument in schema.arguments]
        given = {**dict(zip(names, node.args)), **node.kwargs}
        node.target, node.args = aten._to_copy.default, (given["self"],)
        node.kwargs = {"dtype": given["dtype"]} if given.get("dtype") else {}
    elif node.target is aten.index_copy.default:
        whole, dim, index, part = cast(tuple[Any, ...], node.args)
        before = [None] * (dim % whole.meta["val"].dim())
        node.target, node.args = aten.index_put.default, (whole, [*before, index], part)


@contextmanager
def _linear_rules() -> Iterator[None]:
    """Leave out the optimizer's rule that joins slices into a split. The rule compares each node
    with all others, so its time grows with the square of the number of layers."""
    rules = getattr(rewriter, "_DEFAULT_REWRITE_RULES", ())
    kept = tuple(rule for rule in rules if getattr(rule, "name", "") != "SlicesSplit")
    try:
        rewriter._DEFAULT_REWRITE_RULES = kept or rules
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = rules


def _divide(graph: ir.Graph, node: ir.Node) -> None:
    """Rewrite x · (1 / √v) as x / √v, which ONNX Runtime fuses into one normalisation operator."""
    for x, root in (
        (node.inputs[:2], node.inputs[1::-1]) if node.op_type == "Mul" else ()
    ):
        inverse = root.producer() if root else None
        if (
            inverse
            and inverse.op_type == "Reciprocal"
            and _made_by(inverse.inputs[0]) == "Sqrt"
        ):
            quotient = ir.Node("", "Div", [x, inverse.inputs[0]], num_outputs=1)
            ir.convenience.replace_nodes_and_values(
                graph,
                insertion_point=node,
                old_nodes=[node],
                new_nodes=[quotient],
                old_values=node.outputs,
                new_values=quotient.outputs,
            )
            if not inverse.outputs[0].uses():
                graph.remove(inverse, safe=True)
            return


def _made_by(value: ir.Value | None) -> str:
    producer = value.producer() if value else None
    return producer.op_type if producer else ""


def _add_loop(graph: ir.Graph, step: ir.Graph, states: int) -> None:
    """Append a loop to a graph, with the graph of a step as its body. Both share their common
    inputs."""
    goes_round = ("token", "near_", "state")
    carried = [value for value in step.inputs if str(value.name).startswith(goes_round)]
    _share(graph, step, carried)
    body = _loop_body(step, carried)
    outside = {value.name: value for value in graph.outputs}
    # an ONNX loop takes a count, here the length of `steps`, and a condition
    steps = next(value for value in graph.inputs if value.name == "steps")
    how_often = ir.Node("", "Shape", [steps], outputs=[ir.Value(name="often")])
    yes = ir.Value(name="yes", const_value=ir.tensor(np.array(True)))
    graph.register_initializer(yes)
    said = [outside[name] for name in ("token", "state") if name in outside]
    # the loop starts with what the first pass returned
    begin = [*said, *(outside[f"near_{i}"] for i in range(states))]
    new = [f"new_{i}" for i in range(states)]
    last = ["last", "last_state"][: len(said)]
    names = [*last, *new, "step_logits", "step_hidden"]
    after = [
        ir.Value(name=name, type=end.type) for name, end in zip(names, body.outputs[1:])
    ]
    inputs = [how_often.outputs[0], yes, *begin]
    loop = ir.Node("", "Loop", inputs, [ir.AttrGraph("body", body)], outputs=after)
    graph.extend([how_often, loop])
    graph.outputs.clear()
    # the last step's token and state are carried, but nobody reads them
    graph.outputs.extend([outside["logits"], outside["hidden"], *after[len(said) :]])


def _share(graph: ir.Graph, step: ir.Graph, carried: list[ir.Value]) -> None:
    """Let a step use the outer graph's inputs, outputs and weights, matched by name, and its
    constants, matched by content."""
    outside = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    outside |= {
        name: value for name, value in graph.initializers.items() if _is_weight(value)
    }
    constants = {}
    for value in graph.initializers.values():
        if not _is_weight(value):
            constants[_content(value)] = value
    for value in (
        *step.inputs[2:],
        *step.initializers.values(),
    ):  # the first two are i and token
        if value in carried:
            continue
        if value.is_graph_input() or _is_weight(value):
            outer = outside.get(value.name)
        else:
            outer = constants.get(_content(value))
        if outer is None:
            outer = ir.Value(
                name=f"step_{value.name}",
                type=value.type,
                shape=value.shape,
                const_value=value.const_value,
            )
            graph.register_initializer(outer)
        ir.convenience.replace_all_uses_with(value, outer)


def _loop_body(step: ir.Graph, carried: list[ir.Value]) -> ir.Graph:
    """Return the nodes of a step as the body of a counted loop."""
    number = step.inputs[0]
    nodes = list(step)
    ends = list(step.outputs)
    step.inputs.clear()
    step.outputs.clear()
    step.remove(nodes)
    for value in (
        number,
        *carried,
        *(output for node in nodes for output in node.outputs),
    ):
        value.name = f"step_{value.name}"
    go_on = ir.Value(
        name="step_go_on", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])
    )
    goes_on = ir.Value(name="step_same", type=go_on.type, shape=go_on.shape)
    same = ir.Node("", "Identity", [go_on], outputs=[goes_on])
    return ir.Graph(
        [number, go_on, *carried], [goes_on, *ends], nodes=[same, *nodes], name="step"
    )


def _name_weights(graph: ir.Graph, model: PreTrainedModel) -> None:
    """Name each weight in the graph as in the model, and drop its value, so that no constant is
    computed from a weight before the graph is loaded."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for value in list(graph.initializers.values()):
        # the twin holds the model as `model`
        name = str(value.name).removeprefix("model.")
        if name not in weights:
            continue
        graph.initializers.pop(str(value.name))
        value.name = name
        value.const_value = None
        graph.initializers[name] = value


def _refer_to_weights(graph: ir.Graph, model: PreTrainedModel) -> None:
    """Make each weight of a graph a reference to data outside the file."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for name, value in graph.initializers.items():
        if name not in weights:
            continue
        value.const_value = ir.ExternalTensor(
            location="weights",
            offset=0,
            length=4 * weights[name].numel(),
            dtype=ir.DataType.FLOAT,
            shape=ir.Shape(weights[name].shape),
            name=name,
        )


def _leave_out_comments(model: ir.Model) -> None:
    """Drop the exporter's notes, which are nine tenths of a graph without weights."""
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for graph in graphs:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()


def _is_weight(value: ir.Value) -> bool:
    """True if a constant of the graph has a name but no value."""
    return value.const_value is None


def _content(value: ir.Value) -> Any:
    """Return a key that is equal for constants with equal content."""
    assert value.const_value is not None
    array = value.const_value.numpy()
    return array.dtype, array.shape, array.tobytes()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log lines and warnings."""
    loggers = list(map(logging.getLogger, ("torch.onnx", "onnxscript", "onnx_ir")))
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
