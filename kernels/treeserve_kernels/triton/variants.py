"""The specialisations of every kernel that launches choose from, for compiling them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from treeserve_kernels.triton import border, kv, next_token, tree_attention, walk

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 128)
# Block size, query heads per KV head and others that do not change a kernel's shape.
BLOCK_SIZE = 16
GROUP = 4
KV_WIDTH = 1024
CHUNKS_BLOCK = triton.next_power_of_2(triton.cdiv(131072, next_token.CHUNK))
NODES_BLOCK = 64

_POINTERS = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16"}
_SAMPLING_TYPES = (
    dict.fromkeys(("logits", "bests"), "*fp32")
    | dict.fromkeys(
        ("repetition", "presence", "frequency", "biases", "temperatures", "top_ps", "min_p_gaps", "scores_ptr"), "*fp64"
    )
    | dict.fromkeys(("positions", "unblocked_from", "seeds", "masses", "borders"), "*i64")
    | dict.fromkeys(
        (
            "sequences", "token_ids", "parents", "first_rows", "penalty_offsets", "penalty_ids", "penalty_counts",
            "bias_offsets", "bias_ids", "blocked_offsets", "blocked_ids", "num_blocked", "num_unusable", "top_ks",
            "cuts", "ids_ptr", "tokens", "out",
        ),
        "*i32",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: the types of its run-time arguments by name, and its constants."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, int | str]
    options: Mapping[str, int | bool]
    label: str

    def source(self) -> ASTSource:
        """The kernel with pointers assumed aligned to 16 bytes, as torch allocates them."""
        names = self.kernel.arg_names
        signature = {name: self.types.get(name, "constexpr" if name in self.constants else "i32") for name in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
        return ASTSource(self.kernel, signature, dict(self.constants), aligned)


def variants(dtypes: Sequence[str] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Variant]:
    """Every kernel for every dtype, head size and row tile that a launch can choose."""
    for dtype in dtypes:
        for head_dim in head_dims:
            for tile_rows in tree_attention.tile_row_choices(getattr(torch, dtype)):
                # One split writes the model's dtype; several write float32 parts.
                for out in sorted({dtype, "float32"}):
                    yield _attention(dtype, out, head_dim, tile_rows)
            yield _merge(dtype, head_dim)
        yield from _kv(dtype)
    yield from _sampling()


def _attention(dtype: str, out: str, head_dim: int, tile_rows: int) -> Variant:
    torch_dtype = getattr(torch, dtype)
    data = dict.fromkeys(("q_ptr", "k_cache", "v_cache"), _POINTERS[dtype])
    tables = dict.fromkeys(("block_tables", "context_lens", "query_offsets", "node_offsets"), "*i32")
    other = {"out_ptr": _POINTERS[out], "lse_ptr": "*fp32", "ancestor_words": "*i64", "scale_log2": "fp32"}
    constants: dict[str, int | str] = {
        "block_size": BLOCK_SIZE,
        "group": GROUP,
        "head_dim": head_dim,
        "head_block": tree_attention.head_block_of(head_dim),
        "tile_rows": tile_rows,
        "split_positions": tree_attention.SPLIT_POSITIONS,
        "precision": tree_attention.dot_precision(torch_dtype),
    }
    label = f"{dtype}->{out} head_dim={head_dim} rows={tile_rows}"
    options = tree_attention.compile_options(torch_dtype, tile_rows)
    return Variant(tree_attention.attention_kernel, data | tables | other, constants, options, label)


def _merge(dtype: str, head_dim: int) -> Variant:
    types = {"split_out_ptr": "*fp32", "split_lse_ptr": "*fp32", "out_ptr": _POINTERS[dtype]}
    head_block = tree_attention.head_block_of(head_dim)
    constants = {"head_dim": head_dim, "head_block": head_block, "tile_rows": tree_attention.MERGE_ROWS}
    return Variant(
        tree_attention.merge_kernel, types, constants, {"enable_fp_fusion": True}, f"{dtype} head_dim={head_dim}"
    )


def _kv(dtype: str) -> Iterator[Variant]:
    pointer = _POINTERS[dtype]
    types = {"cache": pointer, "values": pointer, "slots": "*i64"}
    copies = {"enable_fp_fusion": False}
    yield Variant(kv.write_kernel, types, {"width_block": KV_WIDTH}, copies, f"{dtype} width={KV_WIDTH}")
    types = {"cache": pointer, "src": "*i64", "dst": "*i64"}
    tile = {"moves_per_tile": kv.MOVES_PER_TILE, "move_width": kv.MOVE_WIDTH}
    yield Variant(kv.move_kernel, types, tile, copies, f"{dtype} tile={kv.MOVES_PER_TILE}x{kv.MOVE_WIDTH}")


def _sampling() -> Iterator[Variant]:
    """The kernels of a step with every processor and filter, and scores without filters."""
    chunk, chunks = {"chunk": next_token.CHUNK}, {"num_chunks_block": CHUNKS_BLOCK}
    of_chunks = f"chunk={next_token.CHUNK}"

    def variant(kernel: Any, constants: Mapping[str, int], label: str, options: Mapping[str, int | bool]) -> Variant:
        return Variant(kernel, _SAMPLING_TYPES, constants, options, label)

    options = next_token.OPTIONS
    yield variant(next_token.edit_kernel, {"tile": next_token.EDIT_TILE}, f"tile={next_token.EDIT_TILE}", options)
    yield variant(next_token.scan_kernel, chunk, of_chunks, options)
    yield variant(next_token.weigh_kernel, chunk | chunks, of_chunks, options)
    yield variant(border.filter_kernel, {"tile": border.TILE} | chunks, f"tile={border.TILE}", border.OPTIONS)
    for filtered in (False, True):
        label = f"{of_chunks} filtered={filtered}"
        yield variant(next_token.score_kernel, {"filtered": filtered} | chunk | chunks, label, options)
    yield variant(next_token.pick_kernel, {"edited": True} | chunks, f"chunks={CHUNKS_BLOCK}", options)
    yield variant(walk.walk_kernel, {"nodes_block": NODES_BLOCK}, f"nodes={NODES_BLOCK}", walk.OPTIONS)
