"""Shapes of a checkpoint's tensors: of projections, and of layers that keep a state. No torch here."""

from collections.abc import Iterable

from twostroke.model.config import DeltaSpec, MambaSpec, ModelConfig, Projection, StateSpec
from twostroke.model.shapes.state_sizes import DeltaSizes, StateSizes


def shapes_of(projections: Iterable[tuple[Projection | None, int, int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of projections given as (projection, rows, columns). Of several in one tensor the last one ends
    it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for projection, rows, columns in projections:
        if projection is None:
            continue
        shapes[f"{projection.name}.weight"] = (projection.first_row + rows, columns)
        if projection.has_bias:
            shapes[f"{projection.name}.bias"] = (projection.first_row + rows,)
    return shapes


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer that keeps a state."""
    parts, sizes, hidden = config.spec.layer.state, config.state, config.hidden_size
    if parts is None or sizes is None:
        return {}
    shapes = shapes_of([*_state_projections(parts, sizes, hidden), (parts.output, hidden, sizes.output_width)])
    shapes[parts.conv] = (sizes.conv_width, 1, sizes.taps)
    if isinstance(parts, DeltaSpec) and isinstance(sizes, DeltaSizes):
        shapes |= dict.fromkeys((parts.decay_log, parts.decay_bias), (sizes.value_heads,))
        return shapes | {f"{parts.norm}.weight": (sizes.value,)}
    if not isinstance(parts, DeltaSpec) and parts.conv_bias is not None:
        shapes[parts.conv_bias] = (sizes.conv_width,)
    if isinstance(parts, MambaSpec):
        shapes |= dict.fromkeys((parts.decay_log, parts.skip, parts.step_bias), (sizes.matrix[0],))
        shapes[f"{parts.norm}.weight"] = (sizes.output_width,)
    return shapes


def _state_projections(parts: StateSpec, sizes: StateSizes, hidden: int) -> list[tuple[Projection, int, int]]:
    """Return the projections of such a layer's input, with rows and columns."""
    if not isinstance(parts, DeltaSpec):
        return [(parts.inputs, sizes.input_width, hidden)]
    heads, width = sizes.matrix[0], sizes.output_width
    if parts.by_key_heads:
        return [(parts.qkv, sizes.conv_width + width, hidden), (parts.beta, 2 * heads, hidden)]
    return [
        (parts.qkv, sizes.conv_width, hidden),
        (parts.gate, width, hidden),
        (parts.beta, heads, hidden),
        (parts.decay, heads, hidden),
    ]
