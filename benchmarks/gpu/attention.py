"""Tree attention against its torch twin, timed beside torch's SDPA and FlashInfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.device import Device
from treeserve_kernels.sample import AttentionInputs, HeadShape, SequenceShape, chain, random_inputs, random_tree
from treeserve_kernels.tree_attention import tree_attention
from treeserve_kernels.triton.tree_attention import SPLIT_POSITIONS, LaunchPlan, tree_attention_triton

# Largest difference from the twin in float32 over the same inputs; half precision rounds the weights and the result.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
BLOCK_SIZE = 16
_WORKSPACE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Case:
    """One batch of equal sequences: their number, context length and rows, drawn as a tree or a prefill chunk."""

    name: str
    num_sequences: int
    context_len: int
    parents: tuple[int, ...]

    def inputs(self, heads: HeadShape, dtype: torch.dtype, device: Device) -> AttentionInputs:
        """Random inputs; the contexts differ by a few positions so that no sequence lines up with another."""
        sequences = [SequenceShape(self.context_len + i, self.parents) for i in range(self.num_sequences)]
        return random_inputs(sequences, heads, block_size=BLOCK_SIZE, dtype=dtype, device=device.name)


CASES = (
    Case("first step", 3, 0, chain(1)),
    Case("decode", 16, 255, chain(1)),
    Case("decode, long", 4, 8191, chain(1)),
    Case("tree of 16", 16, 500, random_tree(16)),
    Case("tree of 64", 8, 2048, random_tree(64)),
    Case("tree of 64, long", 2, 16000, random_tree(64)),
    Case("prefill chunk", 2, 1000, chain(512)),
)
HEADS = (HeadShape(9, 3, 64), HeadShape(8, 2, 80), HeadShape(32, 8, 128), HeadShape(8, 8, 96))
TINY_CASES = (Case("decode", 2, 20, chain(1)), Case("tree of 5", 2, 9, random_tree(5)))
TINY_HEADS = (HeadShape(2, 1, 64),)


@dataclass(frozen=True)
class CaseResult:
    """One case: its sizes, how it was launched, errors against the twin and median times in milliseconds.

    What FlashInfer has no kernel for, or was not there for, is None.
    """

    name: str
    dtype: str
    heads: HeadShape
    num_sequences: int
    context_len: int
    rows_per_sequence: int
    plan: LaunchPlan
    max_error: float
    tolerance: float
    triton_ms: float
    sdpa_dense_ms: float
    gather_and_sdpa_ms: float
    flashinfer_ms: float | None
    flashinfer_max_error: float | None
    flashinfer_note: str

    @property
    def agrees(self) -> bool:
        """Whether the kernel is as near to the twin as it must be; NaN is not."""
        return self.max_error <= self.tolerance

    def line(self) -> str:
        """For reading along."""
        flashinfer = "-" if self.flashinfer_ms is None else f"{self.flashinfer_ms:.3f}"
        return (
            f"{'ok ' if self.agrees else 'BAD'} {self.name:<17}{self.dtype:<9} H={self.heads.num_heads:<3} "
            f"D={self.heads.head_dim:<4}splits={self.plan.num_splits:<3} error {self.max_error:.1e}  ms: triton "
            f"{self.triton_ms:.3f}, SDPA {self.sdpa_dense_ms:.3f}, with gather {self.gather_and_sdpa_ms:.3f}, "
            f"FlashInfer {flashinfer}"
        )


def check_attention(device: Device, cases: Sequence[Case], heads: Sequence[HeadShape]) -> Iterator[CaseResult]:
    """Every case for every dtype and head shape."""
    return (check_case(case, h, dtype, device) for case in cases for h in heads for dtype in TOLERANCE)


def check_case(case: Case, heads: HeadShape, dtype: torch.dtype, device: Device) -> CaseResult:
    """Compares one case with the twin, then times it beside dense SDPA and FlashInfer."""
    inputs = case.inputs(heads, dtype, device)
    i = inputs
    twin = tree_attention(i.q.float(), i.k_cache.float(), i.v_cache.float(), i.meta, i.scale)
    dense = DenseAttention(inputs)
    flashinfer = _check_flashinfer(inputs, dense, twin, device)
    return CaseResult(
        name=case.name,
        dtype=str(dtype).removeprefix("torch."),
        heads=heads,
        num_sequences=case.num_sequences,
        context_len=case.context_len,
        rows_per_sequence=len(case.parents),
        plan=LaunchPlan.of(dtype, len(i.q), heads.num_heads // heads.num_kv_heads, i.meta, SPLIT_POSITIONS),
        max_error=_max_error(_triton(inputs), twin),
        tolerance=TOLERANCE[dtype],
        triton_ms=device.median_ms(lambda: _triton(inputs)),
        sdpa_dense_ms=device.median_ms(lambda: dense.attend(*dense.keys_values)),
        gather_and_sdpa_ms=device.median_ms(lambda: dense.attend(*dense.gather())),
        flashinfer_ms=flashinfer[0],
        flashinfer_max_error=flashinfer[1],
        flashinfer_note=flashinfer[2],
    )


class DenseAttention:
    """The same attention as torch's SDPA does it: KV gathered to dense tensors, and a dense boolean mask."""

    def __init__(self, inputs: AttentionInputs) -> None:
        meta = inputs.meta
        self._inputs = inputs
        num_sequences = len(meta.context_lens)
        rows = len(inputs.q) // num_sequences
        positions = torch.arange(int(meta.context_lens.max()) + rows, device=inputs.q.device)
        nodes = positions - meta.context_lens[:, None]
        blocks = meta.block_tables.clamp(min=0).long()[:, positions // meta.block_size]
        # Positions past a sequence's end read its first slot, which holds no NaN; the mask hides them.
        slots = blocks * meta.block_size + positions % meta.block_size
        self._slots = torch.where(nodes < rows, slots, slots[:, :1])
        words = meta.ancestor_words.view(num_sequences, rows, -1)
        node = nodes.clamp(0, rows - 1)[:, None, :].expand(-1, rows, -1)
        is_ancestor = (words.gather(2, node // 64) >> (node % 64)) & 1 == 1
        in_context, in_tree = nodes < 0, (nodes >= 0) & (nodes < rows)
        self.mask = in_context[:, None, :] | (in_tree[:, None, :] & is_ancestor)  # bool[S, rows, positions]
        self._q = inputs.q.view(num_sequences, rows, *inputs.q.shape[1:]).transpose(1, 2).contiguous()
        self.keys_values = self.gather()

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [S, KVH, positions, D]."""
        k, v = self._inputs.k_cache[self._slots], self._inputs.v_cache[self._slots]
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def attend(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention [S, H, rows, D]."""
        return F.scaled_dot_product_attention(
            self._q, k, v, attn_mask=self.mask[:, None], scale=self._inputs.scale, enable_gqa=True
        )


def flashinfer_note() -> str:
    """Why FlashInfer is not timed here; empty if it is."""
    return "" if find_spec("flashinfer") else "flashinfer is not installed"


def _check_flashinfer(
    inputs: AttentionInputs, dense: DenseAttention, twin: torch.Tensor, device: Device
) -> tuple[float | None, float | None, str]:
    """Median time, error against the twin, and why there is none: FlashInfer compiles what it can for each shape."""
    note = flashinfer_note() or ("" if device.is_cuda else "flashinfer needs a CUDA device")
    if note:
        return None, None, note
    try:
        attend = _flashinfer(inputs, dense)
        return device.median_ms(attend), _max_error(attend(), twin), ""
    except Exception as error:  # shapes and dtypes without a kernel: said, and not ours to fail for
        return None, None, f"{type(error).__name__}: {str(error)[:200]}"


def _flashinfer(inputs: AttentionInputs, dense: DenseAttention) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged prefill kernel with the tree as a custom mask, planned once as a step's layers share it."""
    meta, q, k = inputs.meta, inputs.q, inputs.k_cache
    rows = len(q) // len(meta.context_lens)
    lengths = (meta.context_lens + rows).tolist()
    blocks = [-(-length // meta.block_size) for length in lengths]
    int32: dict[str, Any] = {"dtype": torch.int32, "device": q.device}
    wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device), "NHD"
    )
    wrapper.plan(
        meta.query_offsets,
        torch.tensor([0, *blocks], **int32).cumsum(0, dtype=torch.int32),
        torch.cat([table[:count] for table, count in zip(meta.block_tables, blocks, strict=True)]),
        torch.tensor([(length - 1) % meta.block_size + 1 for length in lengths], **int32),
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        page_size=meta.block_size,
        custom_mask=torch.cat([m[:, :n].flatten() for m, n in zip(dense.mask, lengths, strict=True)]),
        sm_scale=inputs.scale,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    # Unused slots hold NaN here, which FlashInfer multiplies by zero.
    pages = [c.nan_to_num(0.0).view(-1, meta.block_size, *c.shape[1:]) for c in (inputs.k_cache, inputs.v_cache)]
    return lambda: wrapper.run(q, (pages[0], pages[1]))


def root_bits(heads: HeadShape, dtype: torch.dtype, device: Device) -> dict[str, Any]:
    """A root alone against the same root in a 64-node tree: how many of its values keep their bits."""
    whole = Case("root", 1, 1000 if device.is_cuda else 20, random_tree(64)).inputs(heads, dtype, device)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=device.name)
    meta = replace(whole.meta, query_offsets=offsets, ancestor_words=whole.meta.ancestor_words[:1])
    alone, inside = _triton(replace(whole, q=whole.q[:1], meta=meta))[0], _triton(whole)[0]
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "heads": asdict(heads),
        "equal_share": (alone == inside).float().mean().item(),
        "max_difference": (alone.float() - inside.float()).abs().amax().item(),
    }


def _triton(inputs: AttentionInputs) -> torch.Tensor:
    i = inputs
    return tree_attention_triton(i.q, i.k_cache, i.v_cache, i.meta, i.scale)


def _max_error(out: torch.Tensor, twin: torch.Tensor) -> float:
    return (out.float() - twin).abs().amax().item()
