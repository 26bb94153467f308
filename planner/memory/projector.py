"""Memory of a vision projector: the engine's graph of the picture it reserves for, and the inputs of it.

The graphs of Qwen's projectors and of LLaVA's are followed operator by operator (llama.cpp's `tools/mtmd`);
their buffers are the engine's to the byte on the CPU, and on devices that keep its order and deal out memory
in one piece. Those of other kinds are an estimate from above. All attend by flash attention; where a device
cannot, the engine adds the scores.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.memory.graph_memory import Result, graph_bytes
from planner.model.inventory import Inventory, Tensor

_WARM_SIDE = 46  # llama.cpp sizes a projector of free resolution for 46 x 46 output tokens
_FREE_SIZE = frozenset(
    {"qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "pixtral", "kimivl", "kimik25"}
)
_MERGED = 4  # patches that become one token of the model, in Qwen's projectors
_QWEN = frozenset({"qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"})
_WEIGHTS = Result(0)  # in memory of their own


def projector_compute_bytes(mmproj: Inventory, device: str = "", *, flash_attn: bool = True) -> int:
    """Compute buffer of a vision projector for the largest image that the engine reserves for, on a device.

    Vulkan orders operators anew, which costs up to two vectors of narrow projectors and one of others.
    """
    number = mmproj.number
    nodes = _graph(mmproj)
    if nodes and flash_attn:
        vector = 4 * _patches(mmproj) * _width(mmproj)
        more = max(vector, min(2 * vector, _picture_bytes(mmproj) // 2))
        return graph_bytes(nodes) + (more if device.startswith("Vulkan") else 0)
    width, inner, patches = _width(mmproj), number("vision.feed_forward_length"), _patches(mmproj)
    scores = 0 if flash_attn else number("vision.attention.head_count") * patches
    layers = 4 * patches * (inner + 4 * width + scores)
    return max(layers, 4 * patches * (inner + 2 * width) + _picture_bytes(mmproj))


def projector_inputs_bytes(mmproj: Inventory) -> int:
    """What of an image lies in host memory for a projector on a GPU: three f32 a pixel, places of patches."""
    inputs = {id(s): s.size_bytes for node in _graph(mmproj) for s in node.sources if s.given}
    return sum(inputs.values()) or _picture_bytes(mmproj)


def _picture_bytes(mmproj: Inventory) -> int:
    return 4 * 3 * _patches(mmproj) * _patch(mmproj) ** 2


def _patch(mmproj: Inventory) -> int:
    return max(mmproj.number("vision.patch_size", 14), 1)


def _width(mmproj: Inventory) -> int:
    return mmproj.number("vision.embedding_length")


def _kind(mmproj: Inventory) -> str:
    return str(mmproj.hparams.get("vision.projector_type") or mmproj.hparams.get("projector_type") or "")


def _patches(mmproj: Inventory) -> int:
    if _kind(mmproj) in _FREE_SIZE:
        return (_WARM_SIDE * max(mmproj.number("vision.spatial_merge_size", 2), 1)) ** 2
    return (mmproj.number("vision.image_size", 336) // _patch(mmproj)) ** 2


def _graph(mmproj: Inventory) -> list[Result]:
    """The operators of a projector; none of one that is not known, or whose tensors are not its kind's."""
    kind, tensors = _kind(mmproj), {tensor.name: tensor for tensor in mmproj.tensors}
    products = {"mm.0.weight", "mm.2.weight"}
    for n in _deepstack(tensors):
        products |= {f"v.deepstack.{n}.fc1.weight", f"v.deepstack.{n}.fc2.weight"}
    if any(len(tensors[name].shape) != 2 if name in tensors else True for name in products):
        return []
    layers = sum(f"v.blk.{n}.ffn_up.weight" in tensors for n in range(len(tensors)))
    if not layers or layers != mmproj.number("vision.block_count") or "v.patch_embd.weight" not in tensors:
        return []
    if kind in _QWEN and "v.patch_embd.weight.1" in tensors:
        return _Graph(mmproj, tensors).of_qwen(kind)
    if kind == "mlp" and "v.class_embd" not in tensors:
        return _Graph(mmproj, tensors).of_llava()
    return []


def _deepstack(names: Mapping[str, Tensor]) -> list[int]:
    """Layers whose output goes to the model too."""
    return [n for n in range(len(names)) if f"v.deepstack.{n}.fc1.weight" in names]


class _Graph:
    """The operators of one encoder, in the engine's order."""

    def __init__(self, mmproj: Inventory, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.nodes = tensors, list[Result]()
        self.layers = mmproj.number("vision.block_count")
        self.patch = _patch(mmproj)
        self.row = 4 * _patches(mmproj)  # bytes of one value of each patch
        self.vector = self.row * _width(mmproj)
        self.inner = self.row * mmproj.number("vision.feed_forward_length")
        self.windows = mmproj.number("vision.n_wa_pattern")
        self.picture = Result(self.row * 3 * self.patch**2)

    def of_qwen(self, kind: str) -> list[Result]:
        """Patches in groups of four, places in two dimensions, layers whose output goes to the model too."""
        x = self._sum(self._cut("v.patch_embd.weight"), self._cut("v.patch_embd.weight.1"))
        x = self._moved(self._moved(x))
        if kind == "qwen3vl_merger":
            x = self._biased(x, "v.patch_embd.bias")
            x = self._sum(x, self._moved(self._moved(self._moved(self._op(self.vector, _WEIGHTS)))))
        places = Result(4 * self.row)
        x = self._normed(x, "v.pre_ln")
        mask = Result(self.row * self.row // 4)
        group = Result(self.row // _MERGED)
        if self.windows:
            x = self._op(self.vector, x, group)
        narrowed: Result | None = None
        kept = []
        deepstack = _deepstack(self.tensors)
        for n in range(self.layers):
            q, k, v = self._heads(f"v.blk.{n}", self._normed(x, f"v.blk.{n}.ln1"), places)
            masked = []
            if self.windows and (n + 1) % self.windows:
                narrowed = narrowed or self._op(mask.size_bytes // 2, mask)
                masked = [self._op(narrowed.size_bytes, narrowed)]  # in f16 already, and made so once more
            x = self._layer(f"v.blk.{n}", x, self._op(self.vector, q, k, v, *masked))
            if n in deepstack:
                kept.append((n, x))
        out = self._projected(self._normed(x, "v.post_ln"), "mm.0", "mm.2")
        if self.windows:
            out = self._op(out.size_bytes, out, Result(self.row // _MERGED))
        self._joined(out, kept)
        return self.nodes

    def of_llava(self) -> list[Result]:
        """A picture of one size, places of patches by number, a perceptron."""
        x = self._biased(self._moved(self._cut("v.patch_embd.weight")), "v.patch_embd.bias")
        x = self._sum(x, self._op(self.vector, Result(self.row)))
        x = self._normed(x, "v.pre_ln")
        for n in range(self.layers - 1):  # the output of the last but one goes on
            heads = self._heads(f"v.blk.{n}", self._normed(x, f"v.blk.{n}.ln1"), None)
            x = self._layer(f"v.blk.{n}", x, self._op(self.vector, *heads))
        x = self._normed(x, "v.post_ln")
        self._projected(self._op(self.vector, x, Result(self.row)), "mm.0", "mm.2")
        return self.nodes

    def _op(self, size: int, *sources: Result, in_place: bool = False) -> Result:
        self.nodes.append(Result(size, sources, in_place))
        return self.nodes[-1]

    def _sum(self, one: Result, other: Result) -> Result:
        return self._op(one.size_bytes, one, other, in_place=True)

    def _moved(self, x: Result) -> Result:
        return self._op(x.size_bytes, x)

    def _cut(self, kernel: str) -> Result:
        """A convolution: the picture's patches side by side, their product, transposed."""
        wide = 2 if self.tensors[kernel].type == "f16" else 4
        columns = self._op(self.picture.size_bytes * wide // 4, self.picture)
        return self._moved(self._op(self.vector, columns))

    def _biased(self, x: Result, name: str) -> Result:
        return self._op(x.size_bytes, x, in_place=True) if name in self.tensors else x

    def _normed(self, x: Result, name: str) -> Result:
        if f"{name}.weight" not in self.tensors:
            return x
        found = self._op(x.size_bytes, x)
        for part in ("weight", "bias"):
            found = self._biased(found, f"{name}.{part}")
        return found

    def _product(self, size: int, x: Result, name: str) -> Result:
        return self._biased(self._op(size, x), f"{name}.bias")

    def _layer(self, block: str, x: Result, attended: Result) -> Result:
        """All of a layer behind its attention."""
        x = self._sum(self._product(self.vector, attended, f"{block}.attn_out"), x)
        normed = self._normed(x, f"{block}.ln2")
        if f"{block}.ffn_gate.weight" in self.tensors:
            gate = self._product(self.inner, normed, f"{block}.ffn_gate")
            inner = self._op(self.inner, gate, self._product(self.inner, normed, f"{block}.ffn_up"))
        else:
            up = self._product(self.inner, normed, f"{block}.ffn_up")
            inner = self._op(self.inner, up, in_place=True)
        return self._sum(x, self._product(self.vector, inner, f"{block}.ffn_down"))

    def _heads(self, block: str, x: Result, places: Result | None) -> tuple[Result, Result, Result]:
        """Queries, and keys and values in f16: the latter two are made so when all three are there."""
        if f"{block}.attn_qkv.weight" in self.tensors:
            every = self._product(3 * self.vector, x, f"{block}.attn_qkv")
            q, k, v = (self._turned(every, places), self._turned(every, places), every)
        else:
            q = self._turned(self._product(self.vector, x, f"{block}.attn_q"), places)
            k = self._turned(self._product(self.vector, x, f"{block}.attn_k"), places)
            v = self._product(self.vector, x, f"{block}.attn_v")
        return q, self._op(self.vector // 2, k), self._op(self.vector // 2, v)

    def _turned(self, x: Result, places: Result | None) -> Result:
        return self._op(self.vector, x, places) if places else x

    def _projected(self, x: Result, first: str, second: str) -> Result:
        """Two products with a GELU between."""
        wide, between = self.tensors[f"{first}.weight"].shape
        rows = x.size_bytes // max(wide, 1)
        up = self._product(rows * between, x, first)
        up = self._op(up.size_bytes, up, in_place=True)
        return self._product(rows * self.tensors[f"{second}.weight"].shape[1], up, second)

    def _joined(self, out: Result, kept: list[tuple[int, Result]]) -> None:
        """The outputs of single layers beside that of all: each is kept to the end of the encoder."""
        features: Result | None = None
        for n, x in kept:
            name = f"v.deepstack.{n}"
            found = self._projected(self._normed(x, f"{name}.norm"), f"{name}.fc1", f"{name}.fc2")
            if features is not None:
                found = self._op(features.size_bytes + found.size_bytes, features, found)
            features = found
        if features is not None:
            self._op(out.size_bytes + features.size_bytes, out, features)
